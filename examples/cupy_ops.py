"""The ops on cupy arrays, on a GPU: write a prompt's keys and values, decode one token per sequence.

The result is compared with the oracle on the CPU. Run: python examples/cupy_ops.py
"""

import sys

import numpy as np

import paged_ops
from paged_ops import reference

try:
    import cupy
except ImportError:
    sys.exit("cupy_ops: needs cupy, which is not installed; pip install 'paged_ops[cupy]'")
try:
    num_gpus = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError as error:
    sys.exit(f"cupy_ops: needs a GPU, and CUDA says: {error}")
if num_gpus == 0:
    sys.exit("cupy_ops: needs a GPU, and there is none")

rng = np.random.default_rng(0)
num_blocks, block_size, q_heads, kv_heads, head_dim = 16, 16, 8, 2, 64
tables = np.array([[5, 9, 2], [7, 0, 0]], np.int32)
lengths = np.array([40, 3], np.int32)
owner = np.repeat([0, 1], lengths)
position = np.concatenate([np.arange(length) for length in lengths])
slots = tables[owner, position // block_size].astype(np.int64) * block_size + position % block_size
key, value = rng.standard_normal((2, len(slots), kv_heads, head_dim)).astype(np.float16)
query = (3 * rng.standard_normal((2, q_heads, head_dim))).astype(np.float16)

pool = paged_ops.allocate_kv_pool(
    num_blocks, block_size, 1, kv_heads, head_dim, dtype="float16", device="cuda", framework="cupy"
)
cache = pool.key(0), pool.value(0)
with cupy.cuda.Stream():  # the ops run on the caller's current stream
    paged_ops.write_kv_cache(cupy.asarray(key), cupy.asarray(value), *cache, cupy.asarray(slots))
    out = paged_ops.paged_attention_decode(
        cupy.asarray(query), *cache, cupy.asarray(tables), cupy.asarray(lengths), check=True
    )
    result = cupy.asnumpy(out)

wanted = reference.paged_attention_decode(query, *map(cupy.asnumpy, cache), tables, lengths)
error = np.abs(result - wanted).max()
assert error < 5e-3
print(f"decode in cupy: largest error {error:.1e} beside the float64 oracle, in float16")
