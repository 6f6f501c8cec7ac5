"""Speculative decoding with a tree of drafts, verified by one call of attention per step.

A model of one attention layer writes 64 tokens, first one at a time, then by steps: a cheap guess drafts a
tree of next tokens, `tree_mask` lets each draft see its ancestors alone, and the longest path that the model
agrees with is kept. Both write the same. Run: python examples/speculative_verify.py
"""

import numpy as np

import paged_ops

F32, LENGTH, BLOCK_SIZE = np.float32, 64, 16
VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 97, 64, 4, 2, 16
BRANCHES, DEPTH = 2, 3
rng = np.random.default_rng(0)
embedding = rng.standard_normal((VOCABULARY, WIDTH)).astype(F32)
guess = rng.standard_normal((VOCABULARY, VOCABULARY)).astype(F32)  # what a token makes of the next one
to_query, to_key, to_value = (
    (rng.standard_normal((WIDTH, heads, HEAD_DIM)) / 8).astype(F32) for heads in (HEADS, KV_HEADS, KV_HEADS)
)
to_logits = rng.standard_normal((HEADS * HEAD_DIM, VOCABULARY)).astype(F32)
slopes = np.array([2.0**-i for i in range(1, HEADS + 1)], F32)

# Blocks are not in order; a step's drafts go behind the sequence and may need a block more.
tables = rng.permutation(12).astype(np.int32)[None]


class Sequence:
    """A sequence's keys and values, and the model's answers."""

    def __init__(self) -> None:
        pool = paged_ops.allocate_kv_pool(tables.size, BLOCK_SIZE, 1, KV_HEADS, HEAD_DIM, dtype=F32)
        self.cache = pool.key(0), pool.value(0)

    def write(self, tokens: np.ndarray, begin: int) -> None:
        """Keys and values of tokens, from position `begin` on."""
        x, at = embedding[tokens], begin + np.arange(len(tokens))
        slots = tables[0, at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        key, value = (np.einsum("tw,whd->thd", x, to) for to in (to_key, to_value))
        paged_ops.write_kv_cache(key, value, *self.cache, slots)

    def next_tokens(self, tokens: np.ndarray, begin: int, tree_mask: np.ndarray | None = None) -> np.ndarray:
        """What the model puts after each of `tokens`, which are written at `begin`."""
        self.write(tokens, begin)
        out = paged_ops.paged_attention(
            np.einsum("tw,whd->thd", embedding[tokens], to_query),
            *self.cache,
            tables,
            np.array([begin + len(tokens)], np.int32),
            np.array([0, len(tokens)], np.int32),
            alibi_slopes=slopes,
            tree_mask=tree_mask,
        )
        logits = guess[tokens] + 0.2 * out.reshape(len(tokens), -1) @ to_logits
        return logits.argmax(axis=1)


def draft(root: int) -> tuple[np.ndarray, list[int], np.ndarray]:
    """A tree of drafts below `root`: tokens, each one's parent, and the bits of its ancestors and itself."""
    tokens, parents, masks = [root], [-1], [1]
    level = [0]
    for _ in range(DEPTH):
        born = []
        for parent in level:
            for token in np.argsort(-guess[tokens[parent]])[:BRANCHES]:
                born.append(len(tokens))
                masks.append(masks[parent] | 1 << len(tokens))
                tokens.append(int(token))
                parents.append(parent)
        level = born
    return np.array(tokens), parents, np.array(masks, np.int64)


plain = [1]
sequence = Sequence()
while len(plain) <= LENGTH:
    plain.append(int(sequence.next_tokens(np.array(plain[-1:]), len(plain) - 1)[0]))

text = [1]
sequence = Sequence()
steps = 0
while len(text) <= LENGTH:
    tokens, parents, masks = draft(text[-1])
    answers = sequence.next_tokens(tokens, len(text) - 1, masks)
    path = [0]  # drafts that the model would have written itself
    while True:
        children = [i for i, parent in enumerate(parents) if parent == path[-1]]
        agreed = [i for i in children if tokens[i] == answers[path[-1]]]
        if not agreed:
            break
        path.append(agreed[0])
    # The keys and values of the path close up; those of other drafts lie behind, and are overwritten later.
    sequence.write(tokens[path], len(text) - 1)
    text += [int(answers[i]) for i in path]
    steps += 1

assert text[: LENGTH + 1] == plain[: LENGTH + 1]
assert 1 < LENGTH / steps < DEPTH + 1  # some drafts are kept, and some are not
print(f"{len(text) - 1} tokens in {steps} steps of {len(tokens)} drafts, the same as one at a time")
