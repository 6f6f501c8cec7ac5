"""Block pool: who holds which block, which are free, and which free ones still hold a known prefix."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from reference_engine.prefix_index import PrefixIndex


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free."""


class BlockPool:
    """Reference counts over block ids 0 .. num_blocks - 1.

    A block with no reference is free. A free block that the prefix index knows keeps its contents until
    it is needed, oldest first; the others are handed out in ascending order, so that a pool that was just
    filled is read in one sweep.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: got {num_blocks}, wanted at least 1")
        self.num_blocks = num_blocks
        self._index = index
        self._refcounts = [0] * num_blocks
        self._blank = list(range(num_blocks))  # free, contents of no use; a heap
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, contents known when freed; oldest first

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that a prefix hit can revive."""
        return sum(map(self._index.holds, self._cached))  # a newer block may have taken an entry over

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def free_blocks(self) -> list[int]:
        return [*self._blank, *self._cached]

    def refcount(self, block: int) -> int:
        return self._refcounts[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, or OutOfBlocks and no change."""
        if count > self.num_free:
            raise OutOfBlocks(f"wanted {count} blocks, {self.num_free} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            if self._blank:
                block = heapq.heappop(self._blank)
            else:
                block, _ = self._cached.popitem(last=False)
                self._index.forget(block)
            self._refcounts[block] = 1
            blocks.append(block)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference to each; a free block whose contents are known comes back to life."""
        for block in blocks:
            if self._refcounts[block] == 0:
                if block not in self._cached:
                    raise RuntimeError(f"block {block} is free and holds nothing: it cannot be shared")
                del self._cached[block]
            self._refcounts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each. The only way for a block to become free.

        Of cached blocks the first released is the first to be reused: pass a sequence's blocks last one
        first, since a prefix without its beginning is of no use.
        """
        for block in blocks:
            if self._refcounts[block] == 0:
                raise RuntimeError(f"block {block} was freed twice")
            self._refcounts[block] -= 1
            if self._refcounts[block] == 0:
                if self._index.holds(block):
                    self._cached[block] = None
                else:
                    heapq.heappush(self._blank, block)
