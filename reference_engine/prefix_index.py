"""Prefix index: finds the blocks that already hold the KV of a prompt's beginning.

A block's KV depends on its tokens and on every token before them, so that a full block is known by the
chain (salt, tokens of block 0, tokens of block 1, ...). Its key is the hash of its parent's key and its
own tokens. A hash may collide; a hit is therefore checked: the entry found must continue the very entry
that the block before it hit, with the very same tokens. By induction the whole prefix is equal, whatever
the hash.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def root_material(salt: str) -> bytes:
    """What the key of an empty prefix is hashed from."""
    return b"R" + salt.encode("utf-8", "surrogatepass")


def block_material(parent_key: bytes, tokens: Sequence[int]) -> bytes:
    """What a block's key is hashed from: different (parent, tokens) always give different bytes."""
    head = struct.pack("<cII", b"B", len(parent_key), len(tokens))
    return head + parent_key + struct.pack(f"<{len(tokens)}q", *tokens)


@dataclass(frozen=True, eq=False)
class Entry:
    """A full block whose KV is in the pool, as the continuation of `parent`."""

    key: bytes
    parent: Entry | None  # None for a root: the empty prefix of one salt
    tokens: tuple[int, ...]
    block: int


class PrefixIndex:
    """At most one entry per key and per block. An entry lives from publish() to the reuse of its block."""

    def __init__(self, block_size: int, hash_bytes: Callable[[bytes], bytes] = sha256) -> None:
        self.block_size = block_size
        self._hash = hash_bytes
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._roots: weakref.WeakValueDictionary[str, Entry] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._by_key)

    def entries(self) -> list[Entry]:
        return list(self._by_key.values())

    def holds(self, block: int) -> bool:
        """Whether a hit can lead to `block`."""
        return block in self._by_block

    def root(self, salt: str) -> Entry:
        root = self._roots.get(salt)
        if root is None:
            root = Entry(self._hash(root_material(salt)), None, (), -1)
            self._roots[salt] = root
        return root

    def match(self, salt: str, tokens: Sequence[int], max_blocks: int) -> list[Entry]:
        """Entries of the longest known prefix of `tokens`, at most `max_blocks` full blocks of it."""
        hits: list[Entry] = []
        parent = self.root(salt)
        for start in range(0, max_blocks * self.block_size, self.block_size):
            entry = self._find(parent, tuple(tokens[start : start + self.block_size]))
            if entry is None:
                break
            hits.append(entry)
            parent = entry
        return hits

    def publish(self, parent: Entry, tokens: Sequence[int], block: int) -> Entry:
        """Make the full `block` findable after `parent`, once the step that wrote it has completed.

        Where an equal block is already known, that one stays and is returned. Where another prefix has
        the same key, the newer one takes its place.
        """
        tokens = tuple(tokens)
        known = self._find(parent, tokens)
        if known is not None:
            return known
        entry = Entry(self._key(parent, tokens), parent, tokens, block)
        displaced = self._by_key.pop(entry.key, None)
        if displaced is not None:
            del self._by_block[displaced.block]
        self._by_key[entry.key] = self._by_block[block] = entry
        return entry

    def forget(self, block: int) -> None:
        """`block` is about to be reused for something else."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_key[entry.key]

    def _key(self, parent: Entry, tokens: tuple[int, ...]) -> bytes:
        return self._hash(block_material(parent.key, tokens))

    def _find(self, parent: Entry, tokens: tuple[int, ...]) -> Entry | None:
        entry = self._by_key.get(self._key(parent, tokens))
        if entry is not None and entry.parent is parent and entry.tokens == tokens:
            return entry
        return None
