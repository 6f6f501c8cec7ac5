"""A toy engine on torch: blocks from a free list, a batched prefill, a decode loop over block tables.

Three prompts go through a random two-layer model together, token by token, and the tokens are those that the
same model finds with plain attention over each whole sequence. Run: python examples/torch_engine.py
"""

import torch
import torch.nn.functional as F

import paged_ops

VOCAB, HIDDEN, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS, NEW = 97, 64, 2, 8, 2, 16, 4, 64, 12
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
embed, unembed = torch.randn(2, VOCAB, HIDDEN, device=device)
position = 0.5 * torch.randn(BLOCKS * BLOCK, HIDDEN, device=device)
to_q, to_k, to_v, to_out = (
    torch.randn(LAYERS, *shape, device=device) * 0.2
    for shape in (
        (HIDDEN, Q_HEADS * HEAD_DIM),
        (HIDDEN, KV_HEADS * HEAD_DIM),
        (HIDDEN, KV_HEADS * HEAD_DIM),
        (Q_HEADS * HEAD_DIM, HIDDEN),
    )
)


def model(tokens, positions, attend):
    """Scores [num_tokens, VOCAB]; only attend(layer, query, key, value) knows of sequences."""
    x = embed[tokens] + position[positions]
    for layer in range(LAYERS):
        y = F.layer_norm(x, (HIDDEN,))
        query, key, value = ((y @ w[layer]).view(len(y), -1, HEAD_DIM) for w in (to_q, to_k, to_v))
        x = x + attend(layer, query, key, value).reshape(len(y), -1) @ to_out[layer]
    return F.layer_norm(x, (HIDDEN,)) @ unembed.T


class Engine:
    """All sequences of a batch over one pool of blocks."""

    def __init__(self):
        self.pool = paged_ops.allocate_kv_pool(
            BLOCKS, BLOCK, LAYERS, KV_HEADS, HEAD_DIM, dtype=torch.float32, device=device
        )
        self.free = torch.randperm(BLOCKS).tolist()
        self.blocks, self.lengths = [], []

    def step(self, chunks):
        """Computes the next tokens of every sequence, one list each; the likeliest token after each."""
        self.blocks += [[] for _ in chunks[len(self.blocks) :]]
        self.lengths += [0] * (len(chunks) - len(self.lengths))
        positions = []
        for seq, chunk in enumerate(chunks):
            positions.append(torch.arange(self.lengths[seq], self.lengths[seq] + len(chunk)))
            self.lengths[seq] += len(chunk)
            while len(self.blocks[seq]) * BLOCK < self.lengths[seq]:
                self.blocks[seq].append(self.free.pop())
        table = torch.nn.utils.rnn.pad_sequence([torch.tensor(b) for b in self.blocks], batch_first=True)
        slots = [table[s, p // BLOCK] * BLOCK + p % BLOCK for s, p in enumerate(positions)]
        ends = torch.tensor([0, *map(len, chunks)]).cumsum(0)
        tables, lengths, bounds = (
            x.to(device, torch.int32) for x in (table, torch.tensor(self.lengths), ends)
        )
        slots = torch.cat(slots).to(device)

        def attend(layer, query, key, value):
            cache = self.pool.key(layer), self.pool.value(layer)
            paged_ops.write_kv_cache(key, value, *cache, slots)
            return paged_ops.paged_attention(query, *cache, tables, lengths, bounds)

        tokens = torch.tensor([token for chunk in chunks for token in chunk], device=device)
        scores = model(tokens, torch.cat(positions).to(device), attend)
        return scores[ends[1:] - 1].argmax(dim=1).tolist()


def plain(layer, query, key, value):
    """Causal attention of one whole sequence, without a cache."""
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(Q_HEADS // KV_HEADS, dim=0) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


prompts = [torch.randint(VOCAB, (length,)).tolist() for length in (17, 3, 8)]
engine, chunks, generated = Engine(), prompts, [[] for _ in prompts]
for _ in range(NEW):  # the first step is the prefill, the others decode
    chunks = [[token] for token in engine.step(chunks)]
    for tokens, (token,) in zip(generated, chunks, strict=True):
        tokens.append(token)

for prompt, tokens in zip(prompts, generated, strict=True):
    whole = torch.tensor(prompt + tokens, device=device)
    scores = model(whole[:-1], torch.arange(len(whole) - 1, device=device), plain)
    assert scores[len(prompt) - 1 :].argmax(dim=1).tolist() == tokens and len(set(tokens)) > 3
print(f"{len(prompts)} sequences, {NEW} tokens each on {device}, as without a cache: {generated[0][:8]} ...")
