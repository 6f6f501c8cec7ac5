"""Decode by others, for the GPU report: each takes our inputs and returns a call that gives our output.

A peer that is not installed raises ImportError. Whatever a peer has to prepare (a plan, a copy into its own
layout, a compilation) is done here, and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]

# One CTA per (sequence, query head), a thread per token for the scores and per dim for the sum: what one
# writes first. It reads the keys once per query head.
NAIVE = r"""
__device__ float load(const unsigned short* x) { return __uint_as_float((unsigned)*x << 16); }

extern "C" __global__ void decode(
    const unsigned short* query, const unsigned short* keys, const unsigned short* values, const int* tables,
    const int* seq_lens, float* out, float* scores, long long stride_block, long long stride_token,
    long long stride_head, int max_blocks, int max_len, int block_size, int group, int dim, float scale) {
  const int heads = gridDim.y, seq = blockIdx.x, head = blockIdx.y, length = seq_lens[seq];
  const unsigned short* q = query + ((long long)seq * heads + head) * dim;
  float* mine = scores + ((long long)seq * heads + head) * max_len;
  __shared__ float shared[256];
  float most = -INFINITY, sum = 0;
  for (int t = threadIdx.x; t < length; t += blockDim.x) {
    const long long at = tables[(long long)seq * max_blocks + t / block_size] * stride_block +
                         t % block_size * stride_token + head / group * stride_head;
    float score = 0;
    for (int d = 0; d < dim; d++) score += load(q + d) * load(keys + at + d);
    mine[t] = score * scale;
    most = fmaxf(most, mine[t]);
  }
  shared[threadIdx.x] = most;
  __syncthreads();
  for (int i = 0; i < blockDim.x; i++) most = fmaxf(most, shared[i]);
  for (int t = 0; t < length; t++) sum += expf(mine[t] - most);
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    float o = 0;
    for (int t = 0; t < length; t++) {
      const long long at = tables[(long long)seq * max_blocks + t / block_size] * stride_block +
                           t % block_size * stride_token + head / group * stride_head;
      o += expf(mine[t] - most) * load(values + at + d);
    }
    out[((long long)seq * heads + head) * dim + d] = o / sum;
  }
}
"""


def sdpa(shape: Any, inputs: Any) -> Call:
    """torch's own, on a contiguous copy."""
    import torch

    key, value = inputs.contiguous_kv()
    query = inputs.query[:, :, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query, key, value, enable_gqa=True)[:, :, 0]


def flex(shape: Any, inputs: Any) -> Call:
    """torch's compiled attention, on a contiguous copy."""
    if inputs.query.device.type != "cuda":
        raise ImportError("compiled for a GPU only")
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    key, value = inputs.contiguous_kv()
    query = inputs.query[:, :, None]
    attend = torch.compile(flex_attention)
    return lambda: attend(query, key, value, enable_gqa=True)[:, :, 0]


def flashinfer(shape: Any, inputs: Any) -> Call:
    """FlashInfer's paged decode on matrix instructions, its plan made once."""
    import flashinfer as library  # type: ignore[import-not-found]
    import torch

    device = inputs.query.device
    pages = inputs.block_tables.shape[1]
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=device) * pages,
        inputs.block_tables.flatten(),
        (inputs.seq_lens - 1) % shape.block_size + 1,
        shape.num_kv_heads * shape.group,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        q_data_type=inputs.query.dtype,
        data_type=inputs.query.dtype,
    )
    caches = inputs.key_cache.contiguous(), inputs.value_cache.contiguous()
    return lambda: wrapper.run(inputs.query, caches)


def naive(shape: Any, inputs: Any) -> Call:
    """The kernel above, by cupy."""
    import cupy  # type: ignore[import-not-found]
    import torch

    if shape.dtype != "bfloat16" or inputs.query.device.type != "cuda":
        raise ImportError("written for bfloat16 on a GPU")
    kernel = cupy.RawKernel(NAIVE, "decode")
    num_heads = shape.num_kv_heads * shape.group
    out = torch.empty(shape.num_seqs, num_heads, shape.head_dim, device="cuda")
    scores = torch.empty(shape.num_seqs * num_heads * shape.seq_len, device="cuda")
    tensors = (
        inputs.query, inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens, out, scores
    )  # fmt: skip
    numbers = (*inputs.key_cache.stride()[:3], inputs.block_tables.shape[1], shape.seq_len, shape.block_size,
               shape.group, shape.head_dim)  # fmt: skip
    arguments = (
        *(tensor.data_ptr() for tensor in tensors),
        *(cupy.int64(n) for n in numbers[:3]),
        *(cupy.int32(n) for n in numbers[3:]),
        cupy.float32(shape.head_dim**-0.5),
    )

    def call() -> Any:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            kernel((shape.num_seqs, num_heads), (128,), arguments)
        return out

    return call


PEERS: dict[str, Callable[[Any, Any], Call]] = {
    "sdpa": sdpa,
    "flex": flex,
    "flashinfer": flashinfer,
    "naive": naive,
}
