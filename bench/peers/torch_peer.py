"""torch as a peer: attention on contiguous KV, `index_copy_`, and indexing for whole blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bench.case import Candidate
from bench.peers import Peer
from bench.timing import called
from bench.workloads import Inputs, Shape

if TYPE_CHECKING:
    from bench.case import Setting

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
