"""The ops on NumPy arrays: a prompt written and attended to in chunks, then one token of decode.

Everything is compared with the oracle, `paged_ops.reference`. Run: python examples/numpy_ops.py
"""

import numpy as np

import paged_ops
from paged_ops import reference

rng = np.random.default_rng(0)
num_blocks, block_size, q_heads, kv_heads, head_dim, prompt = 8, 16, 8, 2, 64, 50

pool = paged_ops.allocate_kv_pool(num_blocks, block_size, 1, kv_heads, head_dim, dtype=np.float32)
cache = pool.key(0), pool.value(0)
table = np.array([[6, 1, 4, 3]], np.int32)  # of one sequence, room for 64 tokens
position = np.arange(prompt + 1)
slots = table[0, position // block_size].astype(np.int64) * block_size + position % block_size
key, value = rng.standard_normal((2, prompt + 1, kv_heads, head_dim), np.float32)
query = 3 * rng.standard_normal((prompt + 1, q_heads, head_dim), np.float32)

outs = []
for begin, end in ((0, 20), (20, prompt)):  # a chunk's keys first, then its queries
    paged_ops.write_kv_cache(key[begin:end], value[begin:end], *cache, slots[begin:end])
    lengths, bounds = np.array([end], np.int32), np.array([0, end - begin], np.int32)
    outs.append(paged_ops.paged_attention(query[begin:end], *cache, table, lengths, bounds))

paged_ops.write_kv_cache(key[prompt:], value[prompt:], *cache, slots[prompt:])
lengths = np.array([prompt + 1], np.int32)
out, lse = paged_ops.paged_attention_decode(query[prompt:], *cache, table, lengths, return_lse=True)

bounds = np.array([0, prompt + 1], np.int32)
wanted, wanted_lse = reference.paged_attention(query, *cache, table, lengths, bounds, return_lse=True)
error = np.abs(np.concatenate([*outs, out]) - wanted).max()
assert error < 1e-5 and np.abs(lse - wanted_lse[-1:]).max() < 1e-5
print(f"prefill in two chunks and decode in NumPy: largest error {error:.1e} beside the float64 oracle")
