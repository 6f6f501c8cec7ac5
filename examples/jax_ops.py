"""The ops on JAX arrays, on the CPU, without copies: DLPack in, and the result as a JAX array.

JAX arrays never change, so what the ops write is NumPy's: the cache, and `out`. The result is compared with
the oracle. Run: python examples/jax_ops.py
"""

import sys

import numpy as np

import paged_ops
from paged_ops import reference

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    sys.exit("jax_ops: needs jax, which is not installed; pip install jax")

jax.config.update("jax_platforms", "cpu")
num_blocks, block_size, q_heads, kv_heads, head_dim = 8, 16, 8, 2, 64
keys = jax.random.split(jax.random.key(0), 3)
key, value = (jax.random.normal(k, (40, kv_heads, head_dim)) for k in keys[:2])
query = 3 * jax.random.normal(keys[2], (1, q_heads, head_dim))
tables, lengths = jnp.array([[5, 2, 7]], jnp.int32), jnp.array([40], jnp.int32)

pool = paged_ops.allocate_kv_pool(num_blocks, block_size, 1, kv_heads, head_dim, dtype=np.float32)
cache = pool.key(0), pool.value(0)
position = np.arange(40)
slots = np.asarray(tables)[0, position // block_size].astype(np.int64) * block_size + position % block_size
paged_ops.write_kv_cache(key, value, *cache, slots)
out = np.empty(query.shape, np.float32)
paged_ops.paged_attention_decode(query, *cache, tables, lengths, out=out)
result = jax.dlpack.from_dlpack(out)

wanted = reference.paged_attention_decode(query, *cache, tables, lengths)
error = np.abs(np.asarray(result) - wanted).max()
assert error < 1e-5
print(
    f"decode with JAX arrays: largest error {error:.1e} beside the float64 oracle, result on {result.device}"
)
