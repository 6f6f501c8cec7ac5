"""The one generator of inputs for tests and benchmarks: a frozen `Case`, and `build`, which makes its arrays.

The numbers are chosen so that errors show. Logits have a standard deviation of about 1.8, and at each place
where implementations go wrong (ends of a sequence, of a block, of a chunk, of what a query token sees) a key
holds a visible share of the softmax. Whatever must not be read is poison: unused blocks and tails of blocks
hold NaN, and unused entries of a block table hold wild ids.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_ops import reference, reference_numbers
from paged_ops.testing import arrays

Array = NDArray[Any]

# Entries of a block table that nobody may use: out of any pool's range, and out of int32's when multiplied.
WILD_BLOCK_IDS = (2**30, -7, 2**31 - 1, -(2**31))

# Keys are split at multiples of this in both backends; spikes are planted on both sides of the first cut.
CHUNK_TOKENS = 512


# --- layouts: the caches' memory ------------------------------------------------------------------------


def _contiguous(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], new: Any) -> Any:
    return tuple(new((num_blocks, block_size, heads, dim)) for dim in dims)


def _hnd(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], new: Any) -> Any:
    return tuple(new((num_blocks, heads, block_size, dim)).swapaxes(1, 2) for dim in dims)


def _interleaved(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], new: Any) -> Any:
    both = new((num_blocks, 2, block_size, heads, max(dims)))
    return both[:, 0, :, :, : dims[0]], both[:, 1, :, :, : dims[1]]


def _pool(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], new: Any) -> Any:
    layers = new((num_blocks, 3, 2, block_size, heads, max(dims)))
    return layers[:, 1, 0, :, :, : dims[0]], layers[:, 1, 1, :, :, : dims[1]]


def _pool_hnd(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], new: Any) -> Any:
    layers = new((num_blocks, 3, 2, heads, block_size, max(dims))).swapaxes(3, 4)
    return layers[:, 2, 0, :, :, : dims[0]], layers[:, 2, 1, :, :, : dims[1]]


def _unaligned(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], new: Any) -> Any:
    """No row of a head starts at a multiple of more than its element's size."""
    return tuple(new((num_blocks, block_size, heads, dim + 3))[..., 1 : dim + 1] for dim in dims)


# name -> (num_blocks, block_size, num_kv_heads, (Dk, Dv), new storage of a shape) -> key and value caches
LAYOUTS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "NHD": _contiguous,
    "HND": _hnd,
    "interleaved": _interleaved,
    "pool": _pool,
    "pool HND": _pool_hnd,
    "unaligned": _unaligned,
}


def _vllm(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], new: Any) -> Any:
    """vLLM's own: keys in packs of 16 bytes, a head's token after token; values token beside token."""
    x = math.gcd(dims[0], 16 // new((0,)).itemsize)
    key = new((num_blocks, heads, dims[0] // x, block_size, x)).transpose(0, 3, 1, 2, 4)
    return key, new((num_blocks, heads, dims[1], block_size)).transpose(0, 3, 1, 2)


def _packs(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], new: Any) -> Any:
    """Both in packs of up to 16, the heads' beside each other; of values each begins at an odd place."""
    x, y = (math.gcd(dim, 16) for dim in dims)
    key = new((num_blocks, block_size, dims[0] // x, heads, x)).transpose(0, 1, 3, 2, 4)
    return key, new((num_blocks, block_size, heads, dims[1] // y, y + 1))[..., 1:]


def _scattered(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], new: Any) -> Any:
    """No two dims of a row side by side, nor of keys two tokens; gaps everywhere."""
    key = new((num_blocks, dims[0], block_size + 1, heads + 2))[:, :, 1:, 1:-1].transpose(0, 2, 3, 1)
    value = new((num_blocks, dims[1] + 1, heads, block_size + 3))[:, 1:, :, 2:-1]
    return key, value.transpose(0, 3, 2, 1)


# The same of caches whose rows are not contiguous.
PACKED_LAYOUTS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "vLLM": _vllm,
    "packs": _packs,
    "scattered": _scattered,
}


# --- a case and its inputs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """All that determines the inputs of an attention call (and of the cache ops, which use its caches)."""

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None  # None: decode
    dtype: str = "float32"
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    value_head_dim: int | None = None  # None: as head_dim
    block_size: int = 16
    layout: str = "NHD"
    latent: bool = False  # values are the first dims of the keys, in the same memory
    causal: bool = True
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    tree: bool = False  # the query tokens of each sequence are a tree of drafts
    cache_dtype: str | None = None  # of a quantised cache
    scales: str = "number"  # its: "number", "tensor", "head" or "token"; of int4 per token and group
    scale_groups: tuple[int, int] | None = None  # elements to a scale of int4, in keys and in values
    padding: int = 0  # query tokens after the last sequence's (not in decode)
    strided: bool = False  # query out of a fused QKV tensor, block table out of a wider one
    logit_offset: float = 0.0  # added to every logit, which must change the LSE only
    poison: float = math.nan  # what unused memory holds
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.num_q_heads % self.num_kv_heads == 0 and self.layout in LAYOUTS | PACKED_LAYOUTS
        assert not self.latent or self.dim_value <= self.head_dim
        assert self.q_lens is None or len(self.q_lens) == len(self.seq_lens)
        assert self.q_lens is not None or self.padding == 0
        assert (self.cache_dtype == "int4") == (self.scale_groups is not None)
        if self.tree:
            assert self.q_lens is not None and self.causal and max(self.q_lens, default=0) <= 64

    def __str__(self) -> str:
        """What differs from the defaults, as a test's id."""
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not field.default and value != field.default:
                text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
                shown.append(f"{field.name}={text}")
        return " ".join(shown)

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def dim_value(self) -> int:
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def query_lens(self) -> tuple[int, ...]:
        return (1,) * len(self.seq_lens) if self.q_lens is None else self.q_lens

    @property
    def applied_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def blocks_of(self, seq_len: int) -> int:
        return -(-seq_len // self.block_size)


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, all of one kind (numpy arrays or torch tensors)."""

    case: Case
    query: Any  # [num_tokens, num_q_heads, Dk]
    key_cache: Any  # [num_blocks, block_size, num_kv_heads, Dk]
    value_cache: Any  # [num_blocks, block_size, num_kv_heads, Dv]
    block_tables: Any  # [num_seqs, max_blocks_per_seq] int32
    seq_lens: Any  # [num_seqs] int32
    cu_seqlens_q: Any  # [num_seqs + 1] int32; None: decode
    alibi_slopes: Any = None  # [num_q_heads]
    sinks: Any = None  # [num_q_heads]
    tree_mask: Any = None  # [num_tokens] int64
    k_scale: Any = None  # a number, [1], [num_kv_heads] or [num_blocks, block_size, num_kv_heads (, groups)]
    v_scale: Any = None

    def attention(self, ops: Any, **options: Any) -> Any:
        """Calls `ops.paged_attention_decode` or `ops.paged_attention`; ops: `paged_ops` or its reference."""
        tensors = (self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens)
        options.setdefault("scale", self.case.scale)
        options.setdefault("return_lse", True)
        options.setdefault("window", self.case.window)
        options.setdefault("soft_cap", self.case.soft_cap)
        options.setdefault("alibi_slopes", self.alibi_slopes)
        options.setdefault("sinks", self.sinks)
        options.setdefault("k_scale", self.k_scale)
        options.setdefault("v_scale", self.v_scale)
        if self.cu_seqlens_q is None:
            return ops.paged_attention_decode(*tensors, **options)
        options.setdefault("causal", self.case.causal)
        options.setdefault("tree_mask", self.tree_mask)
        return ops.paged_attention(*tensors, self.cu_seqlens_q, **options)

    def rows_of(self, seq: int) -> slice:
        """The sequence's rows of query, output and LSE."""
        if self.cu_seqlens_q is None:
            return slice(seq, seq + 1)
        return slice(*map(int, self.cu_seqlens_q[seq : seq + 2]))

    def map(self, convert: Callable[[Array], Any]) -> Inputs:
        """The same inputs with every tensor converted."""
        names = [field.name for field in fields(self) if field.name != "case"]
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{n: convert(t) for n, t in tensors.items() if hasattr(t, "shape")})

    def new_out(self) -> Array:
        """A NaN-filled numpy array for the output."""
        shape = len(self.query), self.case.num_q_heads, self.case.dim_value
        return arrays.filled(shape, arrays.DTYPES[self.case.dtype])


def build(case: Case) -> Inputs:
    """The numpy inputs of a case; equal cases give equal bits."""
    rng = np.random.default_rng(case.seed)
    dtype = arrays.DTYPES[case.dtype]
    cache_dtype = dtype if case.cache_dtype is None else arrays.CACHE_DTYPES[case.cache_dtype]
    poison = {"int8": -128, "uint8": 0x88}.get(cache_dtype.name, case.poison)  # of int4: two of -8
    num_tokens = sum(case.query_lens) + case.padding
    dims = tuple(dim // (2 if case.cache_dtype == "int4" else 1) for dim in (case.head_dim, case.dim_value))

    used = [case.blocks_of(seq_len) for seq_len in case.seq_lens]
    num_blocks = sum(used) + 2
    key_cache, value_cache = (LAYOUTS | PACKED_LAYOUTS)[case.layout](
        num_blocks,
        case.block_size,
        case.num_kv_heads,
        dims,
        lambda shape: arrays.filled(shape, cache_dtype, poison),
    )
    k_scale, v_scale = (_scales(case, num_blocks, which, rng) for which in range(2))
    if case.latent:
        value_cache = key_cache[..., : dims[1]]
        v_scale = k_scale if case.scale_groups is None else k_scale[..., : v_scale.shape[-1]]
    block_tables = _tables(case, used, rng.permutation(num_blocks))

    # Each KV head has a direction of +-1s that the queries of its group lean to. A key gets a logit of
    # `height` on top of its noise when that direction is added to it, times height / sqrt(head_dim).
    direction = rng.choice([-1.0, 1.0], (case.num_kv_heads, case.head_dim))
    gain = case.head_dim**-0.5 / case.applied_scale
    query = 1.5 * rng.standard_normal((num_tokens, case.num_kv_heads, case.group, case.head_dim))
    query = gain * (query + direction[:, None, :]).reshape(num_tokens, case.num_q_heads, case.head_dim)

    for seq, seq_len in enumerate(case.seq_lens):
        height = np.full(seq_len, case.logit_offset)
        height[_spikes(case, seq)] += math.log(max(seq_len, 1)) + 1.6
        keys = rng.standard_normal((seq_len, case.num_kv_heads, case.head_dim))
        keys += height[:, None, None] * direction * case.head_dim**-0.5
        if case.latent:
            values = keys[..., : case.dim_value]
        else:
            values = rng.standard_normal((seq_len, case.num_kv_heads, case.dim_value))
        blocks, offsets = _places(block_tables[seq], seq_len, case.block_size)
        if case.cache_dtype is None:
            for cache, rows in ((key_cache, keys), (value_cache, values)):
                cache[blocks, offsets] = rows.astype(dtype).reshape(seq_len, *cache.shape[2:])
        else:
            slots = blocks.astype(np.int64) * case.block_size + offsets
            # Where they share memory the values come with the keys.
            value_parts = (value_cache.copy(), np.copy(v_scale)) if case.latent else (value_cache, v_scale)
            reference.write_kv_cache(
                keys, values, key_cache, value_parts[0], slots, k_scale=k_scale, v_scale=value_parts[1]
            )

    query = query.astype(dtype)
    if case.strided:
        fused = arrays.filled((num_tokens, case.num_q_heads + 2 * case.num_kv_heads, case.head_dim), dtype)
        fused[:, : case.num_q_heads] = query
        query = fused[:, : case.num_q_heads]
    cu_seqlens_q = None
    if case.q_lens is not None:
        cu_seqlens_q = np.concatenate([[0], np.cumsum(case.q_lens)]).astype(np.int32)
    seq_lens = np.array(case.seq_lens, np.int32)
    rules: dict[str, Any] = _rules(case, num_tokens, rng)
    if case.cache_dtype is not None:
        rules |= {"k_scale": k_scale, "v_scale": v_scale}
    return Inputs(case, query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, **rules)


def _scales(case: Case, num_blocks: int, which: int, rng: np.random.Generator) -> Any:
    """Scales with which keys and values of a few units fill a cache's numbers, or room for scales."""
    if case.cache_dtype is None:
        return None
    if case.scale_groups is not None:
        num_groups = (case.head_dim, case.dim_value)[which] // case.scale_groups[which]
        shape = num_blocks, case.block_size, case.num_kv_heads, num_groups
        return arrays.filled(shape, np.dtype(np.float32), case.poison)
    fitting = 8.0 / min(reference_numbers.LARGEST[case.cache_dtype], 448.0)
    if case.scales == "number":
        return fitting
    if case.scales == "token":
        return arrays.filled(
            (num_blocks, case.block_size, case.num_kv_heads), np.dtype(np.float32), case.poison
        )
    size = case.num_kv_heads if case.scales == "head" else 1
    return (fitting * rng.uniform(0.5, 2, size)).astype(np.float32)


def _rules(case: Case, num_tokens: int, rng: np.random.Generator) -> dict[str, Array]:
    """The tensors that a case's rules ask for."""
    rules: dict[str, Array] = {}
    if case.alibi:  # from gentle to steep, not in the heads' order
        slopes = 2.0 ** -np.linspace(1, 8, case.num_q_heads)
        rules["alibi_slopes"] = rng.permutation(slopes).astype(np.float32)
    if case.sinks:  # about as heavy as all keys together, and one that is none
        offset = case.logit_offset if case.soft_cap is None else np.clip(case.logit_offset, -6, 0)
        sinks = offset + 5 + 2 * rng.standard_normal(case.num_q_heads)
        sinks[-1] = -math.inf if case.num_q_heads > 1 else sinks[-1]
        rules["sinks"] = sinks.astype(np.float32)
    if case.tree:  # half of the earlier tokens; bits that count for nothing are set at random
        rules["tree_mask"] = rng.integers(-(2**63), 2**63 - 1, num_tokens, dtype=np.int64)
    return rules


def _tables(case: Case, used: list[int], ids: Array) -> Array:
    """Block tables that hand out `ids` in turn, the rest wild. At least one column."""
    columns = max([1, *used]) + 2
    wild = itertools.cycle(WILD_BLOCK_IDS)
    table = np.array([next(wild) for _ in range(len(used) * columns)], np.int32).reshape(len(used), columns)
    first = 0
    for seq, count in enumerate(used):
        table[seq, :count] = ids[first : first + count]
        first += count
    return table[:, :-2] if case.strided else table


def _places(table: Array, seq_len: int, block_size: int) -> tuple[Array, Array]:
    """Block and offset of each token of a sequence."""
    token = np.arange(seq_len)
    return table[token // block_size], token % block_size


def _spikes(case: Case, seq: int) -> list[int]:
    """Where a sequence's spikes are: on both sides of every edge that one may miss by one."""
    seq_len, block = case.seq_lens[seq], case.block_size
    first_query = seq_len - case.query_lens[seq]
    last_block = (seq_len - 1) // block * block
    edges = [0, 1, block, first_query, first_query + 1, seq_len // 2, last_block, CHUNK_TOKENS, seq_len]
    if case.window is not None:  # of the first query token, of the last one
        edges += [first_query + 1 - case.window, seq_len - case.window]
    return sorted({place for edge in edges for place in (edge - 1, edge) if 0 <= place < seq_len})


# --- other forms of the same inputs ---------------------------------------------------------------------


def select_sequences(inputs: Inputs, seqs: Sequence[int]) -> Inputs:
    """Only these sequences, in this order, over the same caches (numpy inputs)."""
    bounds = np.arange(len(inputs.seq_lens) + 1) if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q
    rows = [np.arange(bounds[s], bounds[s + 1]) for s in seqs]
    cu_seqlens_q = None
    if inputs.cu_seqlens_q is not None:
        cu_seqlens_q = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    order = list(seqs)
    return replace(
        inputs,
        query=inputs.query[np.concatenate(rows)] if rows else inputs.query[:0],
        block_tables=inputs.block_tables[order],
        seq_lens=inputs.seq_lens[order],
        cu_seqlens_q=cu_seqlens_q,
        tree_mask=None if inputs.tree_mask is None else inputs.tree_mask[np.concatenate(rows)],
    )


def one_sequence_per_token(inputs: Inputs) -> Inputs:
    """The decode call that equals a causal varlen call: each query token a sequence that ends with it.

    Padding is left out. Tokens at negative positions become sequences of no tokens.
    """
    seqs = np.repeat(np.arange(len(inputs.seq_lens)), np.diff(inputs.cu_seqlens_q))
    position = np.arange(len(seqs)) - inputs.cu_seqlens_q[seqs + 1] + inputs.seq_lens[seqs]
    return replace(
        inputs,
        query=inputs.query[: len(seqs)],
        block_tables=inputs.block_tables[seqs],
        seq_lens=np.maximum(position + 1, 0).astype(np.int32),
        cu_seqlens_q=None,
    )
