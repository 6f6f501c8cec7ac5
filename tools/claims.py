"""What each compiled CUDA kernel must keep to, for the audit (audit.py)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Claim:
    """What kernels whose demangled name matches `kernels` keep to. 0 and None claim nothing.

    in_flight: bytes of loads that a multiprocessor has under way while it computes, at the occupancy that
    registers and shared memory allow, as a multiple of what the memory's bandwidth asks of it
    (Chip.needed_in_flight).
    loads_in_flight: bytes that a thread loads before it uses the first of them, where no ring does it.
    """

    kernels: str
    why: str
    max_spill: int | None = 0
    in_flight: float = 0
    loads_in_flight: int = 0
    instructions: dict[str, int] = field(default_factory=dict)  # kind -> at least so many
    max_loop: int = 0  # instructions per tile of 16 tokens


ASYNCHRONOUS, BY_ELEMENT, CONVERTED = r"\(RowCopy\)0", r"\(RowCopy\)1", r"\(RowCopy\)2"
PLAIN, RULED = r"\(Rules\)0", r"\(Rules\)1"
SAME, EIGHT_BITS = r"(?P<t>\w+), (?P=t)", r"\w+, (?:f8e4m3|f8e5m2|i8)"  # of query and cache


def split_keys(tile: str, copy: str, rules: str) -> str:
    """The pattern of the attention kernel whose warps split the keys."""
    return rf"attention_kernel<SplitKeys<{tile}, {copy}, {rules}> >"


def split_columns(tile: str, rules: str) -> str:
    """The pattern of the one whose warps split the columns."""
    return rf"attention_kernel<SplitColumns<{tile}, {rules}> >"


def split_dims(share: str, copy: str) -> str:
    """The pattern of the one whose warps split the head dims."""
    return rf"attention_kernel<SplitDims<{share}, {copy}, {RULED}> >"


# Instructions per tile of 16 tokens, by head dim and tiles of 8 columns. An H200's memory takes 223, 446 and
# 892 clocks to bring a multiprocessor the 16 tokens, and in each clock it can issue 4 instructions.
MAX_LOOP = {(64, 1): 224, (128, 1): 277, (256, 1): 377, (64, 2): 310, (128, 2): 402, (256, 2): 600}
# The same where there may be a window, soft cap, ALiBi or tree, for tiles that all columns see. The tanh and
# the slopes are counted, and are jumped over where there is no cap and no slope.
MAX_RULED_LOOP = {
    (64, 1): 360, (128, 1): 420, (256, 1): 520, (64, 2): 600, (128, 2): 680, (256, 2): 880,
}  # fmt: skip
# By head dim, of each of the four warps that share a tile, with 16 columns each.
MAX_SPLIT_LOOP = {64: 260, 128: 325}
MAX_RULED_SPLIT_LOOP = {64: 570, 128: 630}
# By tiles of columns, of each of the four warps that share the dims of wide heads. Rules, and V apart from K,
# are counted and jumped over. 576 dims of 16 tokens take the memory 890 clocks.
MAX_DIMS_LOOP = {1: 510, 2: 810}
# Of caches of 8 bits, which come in half of the clocks: 111, 223 and 446 of an H200's.
MAX_EIGHT_BIT_LOOP = {(64, 1): 760, (128, 1): 1130, (256, 1): 1850, (64, 2): 980, (128, 2): 1380}
MAX_EIGHT_BIT_SPLIT_LOOP = {64: 960}

CLAIMS = [
    *(
        Claim(
            split_keys(rf"MmaTile<{SAME}, {head_dim}, {column_tiles}>", ASYNCHRONOUS, rules),
            "16-bit attention is bound by memory: copies behind the back, matrix instructions, a deep ring",
            in_flight=1.5,
            instructions={"async copy 16": 2, "matrix load": 2, "matrix product": 2},
            max_loop=max_loop,
        )
        for rules, loops in ((PLAIN, MAX_LOOP), (RULED, MAX_RULED_LOOP))
        for (head_dim, column_tiles), max_loop in loops.items()
    ),
    *(
        Claim(
            split_columns(rf"MmaTile<{SAME}, {head_dim}, 2>", rules),
            "prefill is bound by instructions: few of them, and copies that do not hold them up",
            in_flight=1.5,
            instructions={"async copy 16": 2, "matrix load": 2, "matrix product": 2},
            max_loop=max_loop,
        )
        for rules, loops in ((PLAIN, MAX_SPLIT_LOOP), (RULED, MAX_RULED_SPLIT_LOOP))
        for head_dim, max_loop in loops.items()
    ),
    *(
        Claim(
            split_dims(rf"MmaShare<\w+, 576, {column_tiles}>", ASYNCHRONOUS),
            "wide heads: a ring that all warps fill, whose rows of K are V too in latent attention",
            in_flight=1.5,
            instructions={"async copy 16": 9, "matrix load": 18, "matrix product": 18},
            max_loop=max_loop,
        )
        for column_tiles, max_loop in MAX_DIMS_LOOP.items()
    ),
    *(
        Claim(
            split_keys(rf"MmaTile<{EIGHT_BITS}, {head_dim}, {column_tiles}>", ASYNCHRONOUS, RULED),
            "half the bytes, as many of them under way, and widened in less time than they take to come",
            in_flight=1.5,
            instructions={"async copy 16": 2, "matrix load": 2, "matrix product": 2},
            max_loop=max_loop,
        )
        for (head_dim, column_tiles), max_loop in MAX_EIGHT_BIT_LOOP.items()
    ),
    *(
        Claim(
            split_columns(rf"MmaTile<{EIGHT_BITS}, {head_dim}, 2>", RULED),
            "prefill is bound by instructions",
            in_flight=0.75,
            instructions={"async copy 16": 1, "matrix load": 2, "matrix product": 2},
            max_loop=max_loop,
        )
        for head_dim, max_loop in MAX_EIGHT_BIT_SPLIT_LOOP.items()
    ),
    Claim(rf", {CONVERTED}, {RULED}", "int4, quantised caches of wide heads or for f32: right, not fast"),
    Claim(
        split_keys(r"FmaTile<float, \d+>", ASYNCHRONOUS, ".*")
        + "|"
        + split_dims("FmaShare<float, 576>", ASYNCHRONOUS),
        "f32 attention has no matrix instruction, but the same ring",
        in_flight=1,
        instructions={"async copy 16": 2},
    ),
    Claim(
        split_keys(r"MmaTile<.*>", BY_ELEMENT, RULED),
        "rows that are not 16-byte aligned: right, not fast",
        instructions={"matrix load": 2, "matrix product": 2},
    ),
    Claim(rf"(FmaTile|Share)<.*>, {BY_ELEMENT}", "rows that are not 16-byte aligned: right, not fast"),
    Claim(
        r"block_copy_kernel<uint4>",
        "a thread has all its packets under way before it writes one",
        in_flight=1,
        loads_in_flight=64,
        instructions={"load 16": 4, "store 16": 4},
    ),
    Claim(
        r"(gather|cache_write)_kernel<uint4, HeadRows>",
        "heads move 16 bytes at a time",
        in_flight=0.75,
        loads_in_flight=16,
        instructions={"load 16": 1, "store 16": 1},
    ),
    Claim(
        r"(block_copy|gather|cache_write)_kernel<unsigned (int|short|char)(, HeadRows)?>",
        "as wide as alignment allows",
    ),
    Claim(r"(gather|cache_write)_kernel<.*, PackedRows>", "head dims in packs: as wide as these allow"),
    Claim(r"(cache|rope)_quantise_kernel<", "a warp per row"),
    Claim(r"merge_states_kernel<", "a pass over two outputs"),
    Claim(r"gather_scaled_kernel<", "by element"),
    Claim(r"rope_write_kernel<", "four pairs per thread where alignment allows, and one into packs"),
    Claim(r"(cu_seqlens|work_list)_kernel", "one CTA"),
    Claim(r"check_\w+_kernel", "only with check=True"),
]
