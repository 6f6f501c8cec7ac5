"""torch as a peer: attention on contiguous KV, `index_copy_`, and indexing for whole blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from bench.case import Candidate
from bench.peers import Peer
from bench.timing import called
from bench.workloads import Inputs, Shape

if TYPE_CHECKING:
    from bench.case import Setting
    from bench.cases.blocks import BlockData
    from bench.cases.write import WriteData

# It keeps probabilities in the tensors' dtype and sums otherwise than we do; a wrong result is farther off.
_CLOSE_ENOUGH = 0.03


class TorchPeer(Peer):
    def decode(self, setting: Setting, shape: Shape, order: str, most: int) -> dict[str, Candidate]:
        """Scaled dot product attention on contiguous KV: what no paged kernel could have."""
        half = (shape.num_seqs, shape.num_kv_heads, shape.seq_len, shape.head_dim)
        flat = setting.arena.view(shape.torch_dtype)
        window = 2 * shape.num_seqs * shape.num_kv_heads * shape.seq_len * shape.head_dim
        num_windows = min(len(flat) // window, most)
        kv = flat[: num_windows * window].view(num_windows, 2, *half)
        query = 2 * torch.randn(shape.num_seqs, shape.num_kv_heads * shape.group, shape.head_dim)
        query = query.to(shape.torch_dtype)

        def call(turn: int) -> Any:
            key, value = kv[turn % num_windows]
            return torch.nn.functional.scaled_dot_product_attention(
                query[:, :, None], key, value, enable_gqa=True
            )

        def check(turn: int) -> str:
            key, value = kv[turn % num_windows].transpose(2, 3)  # one block per sequence
            inputs = Inputs(
                query=query,
                key_cache=key,
                value_cache=value,
                block_tables=torch.arange(shape.num_seqs, dtype=torch.int32)[:, None],
                seq_lens=torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32),
            )
            error = inputs.worst_error(call(turn)[:, :, 0], num_checked=1)
            return "" if error < _CLOSE_ENOUGH else f"wrong by {error:.3g} of the largest output"

        return {"torch": Candidate(called(call), check, shape.kv_nbytes)}

    def prefill(self, setting: Setting, shape: Shape) -> dict[str, Candidate]:
        """Causal attention of a prompt on its own contiguous keys and values."""
        dims = (shape.num_kv_heads, shape.seq_len, shape.head_dim)
        flat = setting.arena.memory
        num_windows = min(len(flat) // (2 * math.prod(dims)), 16)
        kv = flat[: num_windows * 2 * math.prod(dims)].view(num_windows, 2, 1, *dims)
        query = 2 * torch.randn(1, shape.num_kv_heads * shape.group, *dims[1:])
        query = query.bfloat16()

        def call(turn: int) -> Any:
            key, value = kv[turn % num_windows]
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )

        def check(turn: int) -> str:
            key, value = kv[turn % num_windows].transpose(2, 3)
            last = Inputs(
                query=query[:, :, -1],
                key_cache=key,
                value_cache=value,
                block_tables=torch.zeros(1, 1, dtype=torch.int32),
                seq_lens=torch.tensor([shape.seq_len], dtype=torch.int32),
            )
            error = last.worst_error(call(turn)[:, :, -1])
            return "" if error < _CLOSE_ENOUGH else f"wrong by {error:.3g} of the largest output"

        return {"torch": Candidate(called(call), check, shape.kv_nbytes)}

    def overhead(self, setting: Setting, shape: Shape) -> dict[str, Candidate]:
        """Its attention on as tiny a sequence."""
        return self.decode(setting, shape, "in-order", 1)

    def write(self, setting: Setting, data: WriteData) -> dict[str, Candidate]:
        """`index_copy_` into slots (NHD) or rows of one head (HND), with indices made before."""
        width = data.key.shape[2]
        if data.layout == "NHD":
            keys, values = (cache.flatten(0, 1) for cache in (data.key_cache, data.value_cache))
            key, value, indices = data.key, data.value, list(data.slots)
        else:
            keys, values = (c.transpose(1, 2).view(-1, width) for c in (data.key_cache, data.value_cache))
            key, value = data.key.view(-1, width), data.value.view(-1, width)
            indices = [data.rows(slots).flatten() for slots in data.slots]
        assert keys.data_ptr() == data.key_cache.data_ptr()  # a view, not a copy

        def call(turn: int) -> None:
            index = indices[turn % len(indices)]
            keys.index_copy_(0, index, key)
            values.index_copy_(0, index, value)

        return {"torch": data.candidate(call)}

    def copy(self, setting: Setting, data: BlockData) -> dict[str, Candidate]:
        """Advanced indexing, and a `copy_` for each block."""

        def indexing(turn: int) -> None:
            of, to = data.turn(turn).T
            data.destination[to] = data.source[of]

        def each(turn: int) -> None:
            for of, to in data.turn(turn).tolist():
                data.destination[to].copy_(data.source[of])

        return {"torch indexing": data.candidate(indexing), "torch copy_": data.candidate(each)}
