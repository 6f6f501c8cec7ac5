"""Block table: which pool block holds each block of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTable:
    """Append-only int32 block ids; `replace` (copy-on-write) is the one exception.

    `ids` is a view that later appends do not change and a replacement leaves behind, so that a step plan
    may keep it as a snapshot for free.
    """

    def __init__(self, block_size: int, ids: Sequence[int] | npt.NDArray[np.int32] = ()) -> None:
        self.block_size = block_size
        self._ids = np.array(ids, np.int32)
        self._length = len(ids)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(self.ids[index])

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self._length]

    @property
    def capacity(self) -> int:
        """Tokens that the blocks have room for."""
        return self._length * self.block_size

    def append(self, blocks: Sequence[int]) -> None:
        end = self._length + len(blocks)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * self._length, 8), np.int32)
            grown[: self._length] = self.ids
            self._ids = grown
        self._ids[self._length : end] = blocks
        self._length = end

    def replace(self, index: int, block: int) -> int:
        """Put `block`, a private copy, where a shared block was; returns the shared one."""
        shared = self[index]
        self._ids = self.ids.copy()
        self._ids[index] = block
        return shared

    def fork(self) -> BlockTable:
        return BlockTable(self.block_size, self.ids)

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Pool slots of the tokens at positions start .. stop - 1: block * block_size + offset."""
        positions = np.arange(start, stop, dtype=np.int64)
        blocks = self.ids[positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size
