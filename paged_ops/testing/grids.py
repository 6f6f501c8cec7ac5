"""The grids of cases that op tests run over: small covering arrays for every run, products for `--slow`."""

from __future__ import annotations

from typing import Any

from paged_ops.testing.arrays import EIGHT_BITS
from paged_ops.testing.backends import Target
from paged_ops.testing.cases import LAYOUTS, Case
from paged_ops.testing.covering import covering

DTYPES = ("float32", "float16", "bfloat16")
BLOCK_SIZES = (1, 3, 16, 256)
GROUPS = (1, 2, 3, 7, 8, 16, 64)
# Key and value head dims: those of every grid, and wide ones with a grid of their own.
HEAD_DIMS = ((8, 8), (40, 40), (64, 64), (80, 80), (128, 128), (256, 256), (64, 128), (128, 40), (8, 256))
WIDE_HEAD_DIMS = ((576, 512), (576, 576), (512, 512), (320, 320), (264, 264), (264, 8), (64, 576))


def lens_around(block_size: int, *, longest: int = 1) -> tuple[int, ...]:
    """Lengths on both sides of a block's and a chunk's end; the longest in the middle."""
    lens = {0, 1, block_size - 1, block_size, block_size + 1, 511, 512, 513} - {longest}
    shuffled = sorted(lens, key=lambda n: (n * 7919) % 1009)  # long and short side by side
    return (*shuffled[:4], longest, *shuffled[4:])


def _case(row: dict[str, Any], **other: Any) -> Case:
    """A case from one row of a covering array."""
    row = dict(row)
    head_dim, value_head_dim = row.pop("dims")
    group = row.pop("group")
    row["num_kv_heads"] = min(row["num_kv_heads"], max(1, 64 // group))  # enough heads, and no more
    row["num_q_heads"] = group * row["num_kv_heads"]
    return Case(head_dim=head_dim, value_head_dim=value_head_dim, **row, **other)


def _axes(target: Target) -> dict[str, Any]:
    """What decode and varlen attention have in common."""
    # The emulator runs a thread of a block at a time: fewer KV heads there, since they only add blocks.
    emulated = target.backend == "emulated"
    return {
        "dtype": DTYPES,
        "group": GROUPS,
        "dims": HEAD_DIMS,
        "block_size": BLOCK_SIZES,
        "layout": tuple(LAYOUTS),
        "num_kv_heads": (1, 2) if emulated else (1, 2, 3),
        "strided": (False, True),
        "scale": (None, 0.3),
        "logit_offset": (0.0, 100.0, -100.0),
    }


def decode_cases(target: Target) -> list[Case]:
    """Pairs of every two axes; each case holds all critical lengths."""
    rows = covering(_axes(target), seed=1)
    if target.backend == "emulated":
        # Each case holds a few of the lengths.
        lens = ((0, 1, 513), (15, 16, 17), (2, 3, 4), (255, 256, 257), (511, 512, 1), (600, 0, 5))
        return [_case(row, seq_lens=lens[i % len(lens)], seed=i) for i, row in enumerate(rows)]
    return [
        _case(row, seq_lens=lens_around(row["block_size"], longest=1300), seed=i)
        for i, row in enumerate(rows)
    ]


# (tokens in the cache, query tokens) of each sequence.
VARLEN_SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "context": ((0, 0), (1, 1), (16, 5), (17, 17), (513, 20), (40, 0)),
    "prefill": ((70, 70), (3, 3), (33, 33)),
    "chunk": ((530, 33), (512, 1), (514, 3)),
    "decode": ((1, 1), (300, 1), (512, 1)),
    "too many": ((3, 5), (0, 2), (20, 4)),
}


# Beyond two chunks: where rules meet their ends.
LONG_SHAPES = {"long": ((1200, 30), (1030, 9), (3, 2))}


def _batch(row: dict[str, Any], shape: str, seed: int, *, one_token: tuple[int, ...]) -> Case:
    """A case of a named shape, or of decode with the lengths `one_token`."""
    if shape == "one token":
        return _case(row | {"causal": True}, seq_lens=one_token, seed=seed)
    seq_lens, q_lens = zip(*(VARLEN_SHAPES | LONG_SHAPES)[shape], strict=True)
    return _case(row, seq_lens=seq_lens, q_lens=q_lens, seed=seed)


def varlen_cases(target: Target) -> list[Case]:
    """Pairs of every two axes, shapes of the batch among them."""
    axes = _axes(target) | {"shape": tuple(VARLEN_SHAPES), "causal": (True, False), "padding": (0, 5)}
    cases: list[Case] = []
    for i, row in enumerate(covering(axes, seed=2)):
        seq_lens, q_lens = zip(*VARLEN_SHAPES[row.pop("shape")], strict=True)
        cases.append(_case(row, seq_lens=seq_lens, q_lens=q_lens, seed=i))
    return cases


# Windows that end inside a tile, a block and a chunk, and one that hides nothing.
RULES: dict[str, Any] = {
    "window": (None, 1, 5, 100, 513, 5000),
    "soft_cap": (None, 6.0),
    "alibi": (False, True),
    "sinks": (False, True),
}


def ruled_cases(target: Target) -> list[Case]:
    """Pairs of every two axes, the rules among them; decode, varlen and trees of drafts."""
    axes = _axes(target) | RULES
    axes |= {
        "shape": ("context", "prefill", "chunk", "too many", "long", "one token"),
        "causal": (True, False),
        "tree": (False, True),
        "padding": (0, 5),
    }
    cases: list[Case] = []
    for i, row in enumerate(covering(axes, seed=3)):
        shape = row.pop("shape")
        row["causal"] = row["causal"] or row["tree"]
        if shape == "one token":
            row |= {"tree": False, "padding": 0}
        if row["tree"] and shape == "prefill":
            shape = "context"  # of 70 query tokens a tree knows 64
        cases.append(_batch(row, shape, i, one_token=(0, 1, 513, 40, 1300)))
    return cases


def quantised_cases(target: Target) -> list[Case]:
    """Pairs of every two axes over quantised caches, decode and varlen, with a window now and then."""
    axes = _axes(target) | {
        "cache_dtype": EIGHT_BITS,
        "scales": ("number", "tensor", "head", "token"),
        "shape": (*VARLEN_SHAPES, "one token"),
        "window": (None, 100),
        "causal": (True, False),
    }
    cases: list[Case] = []
    for i, row in enumerate(covering(axes, seed=4)):
        shape = row.pop("shape")
        cases.append(_batch(row, shape, i, one_token=(0, 1, 513, 40, 700)))
    return cases


def int4_cases(target: Target) -> list[Case]:
    """The same over caches of int4, with groups from the smallest to whole rows."""
    axes = _axes(target) | {
        "groups": ("smallest", "row", "halves", "smallest and row"),
        "shape": (*VARLEN_SHAPES, "one token"),
        "window": (None, 100),
        "causal": (True, False),
    }
    cases: list[Case] = []
    for i, row in enumerate(covering(axes, seed=5)):
        shape, groups = row.pop("shape"), row.pop("groups")
        dims = tuple(dim or row["dims"][0] for dim in row["dims"])
        row["scale_groups"] = {
            "smallest": (8, 8),
            "row": dims,
            "halves": tuple(dim // 2 if dim % 16 == 0 else dim for dim in dims),
            "smallest and row": (8, dims[1]),
        }[groups]
        row["cache_dtype"] = "int4"
        cases.append(_batch(row, shape, i, one_token=(0, 1, 513, 40, 700)))
    return cases


def wide_cases(target: Target) -> list[Case]:
    """Pairs of every two axes with wide heads, decode and varlen, values in the keys' memory or not."""
    axes = _axes(target) | {
        "dims": WIDE_HEAD_DIMS,
        "group": (1, 8, 16, 40) if target.backend == "emulated" else (1, 8, 16, 40, 128),
        "block_size": (1, 16, 64),
        "latent": (True, False),
        "shape": ("context", "chunk", "too many", "one token"),
        "rules": ("none", "all", "tree"),
        "causal": (True, False),
    }
    cases: list[Case] = []
    for i, row in enumerate(covering(axes, seed=5)):
        shape, rules = row.pop("shape"), row.pop("rules")
        row["latent"] = row["latent"] and row["dims"][1] <= row["dims"][0]
        if rules != "none":
            row |= {"window": 100, "soft_cap": 6.0, "alibi": True, "sinks": True}
        if rules == "tree" and shape != "one token":
            row |= {"tree": True, "causal": True}
        cases.append(_batch(row, shape, i, one_token=(0, 1, 513, 40)))
    return cases


# What a cache may hold and how it is scaled, in one axis, for pairs of features.
CACHES: dict[str, dict[str, Any]] = {
    "as the query": {},
    "e4m3 by token": {"cache_dtype": "float8_e4m3fn", "scales": "token"},
    "e5m2 by head": {"cache_dtype": "float8_e5m2", "scales": "head"},
    "int8": {"cache_dtype": "int8"},
    "int8 by token": {"cache_dtype": "int8", "scales": "token"},
    "int4": {"cache_dtype": "int4", "scale_groups": (8, 8)},
}


def feature_cases(target: Target) -> list[Case]:
    """Every pair of features meets: masks, logits, caches, layouts, shapes of heads and of the batch."""
    axes: dict[str, Any] = {
        "dtype": DTYPES,
        "cache": tuple(CACHES),
        "layout": ("NHD", "pool HND", "unaligned", "vLLM", "scattered"),
        "dims": ((64, 64), (128, 40), (576, 512), (320, 320)),
        "latent": (False, True),
        "group": (1, 5, 16),
        "block_size": (4, 16),
        "shape": ("decode", "chunk", "tree"),
        "window": (None, 37),
        "soft_cap": (None, 6.0),
        "alibi": (False, True),
        "sinks": (False, True),
    }
    cases: list[Case] = []
    for i, row in enumerate(covering(axes, seed=6)):
        row |= CACHES[row.pop("cache")]
        row["latent"] = row["latent"] and row["layout"] in LAYOUTS and row["dims"][1] <= row["dims"][0]
        row["num_kv_heads"] = 1 if row["latent"] else 2
        shape = row.pop("shape")
        seq_lens = (530, 0, 17, 70)
        q_lens = {"decode": None, "chunk": (9, 2, 17, 1), "tree": (12, 0, 17, 3)}[shape]
        cases.append(_case(row, seq_lens=seq_lens, q_lens=q_lens, tree=shape == "tree", seed=i))
    return cases


def extended_cases(target: Target) -> list[Case]:
    """The product of dtypes, groups, head dims and block sizes, layouts in turn."""
    layouts = list(LAYOUTS)
    cases: list[Case] = []
    for dtype in DTYPES:
        for group in GROUPS:
            for dims in HEAD_DIMS:
                for block_size in BLOCK_SIZES:
                    row = {
                        "dtype": dtype,
                        "group": group,
                        "dims": dims,
                        "block_size": block_size,
                        "num_kv_heads": 2,
                    }
                    row["layout"] = layouts[len(cases) % len(layouts)]
                    lens = (
                        (0, 1, 17, 513)
                        if target.backend == "emulated"
                        else lens_around(block_size, longest=2100)
                    )
                    cases.append(_case(row, seq_lens=lens, seed=len(cases)))
    return cases
