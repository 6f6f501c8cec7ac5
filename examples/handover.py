"""Prefill in one process, decode in another: a sequence's blocks of all layers go over in shared memory.

    python examples/handover.py

A toy model (random weights, two layers of grouped-query attention with rotary embedding) reads a prompt in
one process, which exports the sequence's blocks into a shared buffer. Another process imports them into other
blocks of a pool of its own and goes on generating. The tokens and the last logits are those of one process
that does both, bit by bit.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import numpy as np

import paged_ops

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 8, 2, 32, 16
WIDTH, VOCABULARY, MAX_TOKENS, NEW_TOKENS = Q_HEADS * HEAD_DIM, 97, 128, 24
PROMPT = np.random.default_rng(7).integers(0, VOCABULARY, 53)


class Worker:
    """The model with a pool of its own, which has one sequence in the blocks that it is given."""

    def __init__(self, num_blocks: int, blocks: list[int]) -> None:
        rng = np.random.default_rng(0)  # the same weights in every process
        projected = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM

        def weights(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

        self.embedding = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
        self.output = weights(WIDTH, VOCABULARY)
        self.layers = [(weights(WIDTH, projected), weights(WIDTH, WIDTH)) for _ in range(LAYERS)]
        angles = np.outer(np.arange(MAX_TOKENS), 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        self.pool = paged_ops.allocate_kv_pool(
            num_blocks, BLOCK_SIZE, LAYERS, KV_HEADS, HEAD_DIM, dtype="float32", framework="numpy"
        )
        self.blocks = np.array(blocks, np.int32)
        self.length = 0

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """Takes tokens in behind those that it has; the logits of what comes next."""
        places = self.length + np.arange(len(tokens))
        slots = self.blocks[places // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + places % BLOCK_SIZE
        self.length += len(tokens)
        lengths, bounds = np.array([self.length], np.int32), np.array([0, len(tokens)], np.int32)
        x = self.embedding[tokens]
        for layer, (project, mix) in enumerate(self.layers):
            key_cache, value_cache = self.pool.key(layer), self.pool.value(layer)
            heads = (_normalised(x) @ project).reshape(len(tokens), -1, HEAD_DIM)
            query, key, value = np.split(heads, [Q_HEADS, Q_HEADS + KV_HEADS], axis=1)
            paged_ops.rope_and_write_kv_cache(
                query, key, value, key_cache, value_cache, slots, places, self.cos_sin, query_out=query
            )
            attended = paged_ops.paged_attention(
                query, key_cache, value_cache, self.blocks[None], lengths, bounds
            )
            x = x + attended.reshape(len(tokens), WIDTH) @ mix
        return _normalised(x[-1]) @ self.output

    def generate(self, logits: np.ndarray) -> tuple[list[int], bytes]:
        """Greedily on from some logits: the tokens, and the last logits' bytes."""
        tokens = []
        for _ in range(NEW_TOKENS):
            tokens.append(int(logits.argmax()))
            logits = self.read(np.array(tokens[-1:]))
        return tokens, logits.tobytes()


def _normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True))


def packed(memory: SharedMemory, worker: Worker, count: int) -> np.ndarray:
    """The shared buffer as so many blocks of the pool, which is one tensor that holds all layers."""
    return np.ndarray((count, 1, *worker.pool.tensor.shape[1:]), np.float32, memory.buf)


def prefill(name: str, decoder: Connection) -> None:
    """Reads the prompt, puts its blocks into the buffer and says that they are there."""
    worker = Worker(9, [7, 2, 5, 0, 8, 3])
    logits = worker.read(PROMPT)
    used = -(-worker.length // BLOCK_SIZE)
    memory = SharedMemory(name)
    paged_ops.export_blocks(
        worker.pool.tensor, worker.blocks[:used].tolist(), out=packed(memory, worker, used)
    )
    memory.close()
    decoder.send((worker.length, logits))


def decode(name: str, prefiller: Connection, report: Connection) -> None:
    """Takes the blocks over into its own, and generates."""
    worker = Worker(30, [20, 21, 4, 11, 3, 29])
    worker.length, logits = prefiller.recv()
    used = -(-worker.length // BLOCK_SIZE)
    memory = SharedMemory(name)
    paged_ops.import_blocks(packed(memory, worker, used), worker.pool.tensor, worker.blocks[:used].tolist())
    memory.close()
    report.send(worker.generate(logits))


def main() -> None:
    alone = Worker(6, [5, 4, 3, 2, 1, 0])
    wanted = alone.generate(alone.read(PROMPT))

    context = multiprocessing.get_context("spawn")
    nbytes = -(-len(PROMPT) // BLOCK_SIZE) * alone.pool.nbytes_per_block
    memory = SharedMemory(create=True, size=nbytes)
    try:
        sends, receives = context.Pipe(), context.Pipe()
        processes = [
            context.Process(target=prefill, args=(memory.name, sends[0])),
            context.Process(target=decode, args=(memory.name, sends[1], receives[0])),
        ]
        for process in processes:
            process.start()
        found = receives[1].recv() if receives[1].poll(60) else None
        for process in processes:
            process.join(60)
    finally:
        memory.close()
        memory.unlink()
    print(f"{nbytes} bytes of {len(PROMPT)} tokens went over; then came {found and found[0]}")
    if found != wanted:
        raise SystemExit(f"one process says {wanted[0]}")
    print("as in one process, to the bits of the last logits")


if __name__ == "__main__":
    main()
