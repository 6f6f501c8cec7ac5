"""NumPy as a peer: fancy indexing, which is what one would write without paged ops. It has no attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.case import Candidate
from bench.peers import Peer

if TYPE_CHECKING:
    from bench.case import Setting
    from bench.cases.blocks import BlockData
    from bench.cases.write import WriteData


def _words(tensor: Any) -> np.ndarray[Any, Any]:
    """The same memory as 16-bit integers, for bfloat16 is not NumPy's own."""
    return tensor.view(torch.int16).numpy()


class NumpyPeer(Peer):
    def write(self, setting: Setting, data: WriteData) -> dict[str, Candidate]:
        key, value, keys, values = map(_words, (data.key, data.value, data.key_cache, data.value_cache))
        block_size = keys.shape[1]
        places = [(slots // block_size, slots % block_size) for slots in data.slots.numpy()]

        def call(turn: int) -> None:
            place = places[turn % len(places)]
            keys[place] = key
            values[place] = value

        return {"numpy": data.candidate(call)}

    def copy(self, setting: Setting, data: BlockData) -> dict[str, Candidate]:
        source, destination, pairs = _words(data.source), _words(data.destination), data.pairs.numpy()

        def call(turn: int) -> None:
            of, to = pairs[turn % len(pairs)].T
            destination[to] = source[of]

        return {"numpy": data.candidate(call)}
