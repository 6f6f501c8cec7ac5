"""Keeps the tables of docs/ops.md true: what the ops take and what they refuse, as `supports()` says.

python tools/ops_tables.py            # prints them
python tools/ops_tables.py --write    # puts them between the page's markers
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import paged_ops

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ops.md"
BEGIN, END = "<!-- from tools/ops_tables.py -->", "<!-- to here -->"

QUERY_DTYPES = ("float32", "float16", "bfloat16")
CACHE_DTYPES = (*QUERY_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8", "int4")
PLAIN: dict[str, Any] = {"dtype": "bfloat16", "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
# What people try, one step outside and inside of what is taken.
TRIED: tuple[dict[str, Any], ...] = (
    {"num_q_heads": 14, "num_kv_heads": 2},
    {"num_q_heads": 128, "num_kv_heads": 1},
    {"num_q_heads": 5, "num_kv_heads": 2},
    {"head_dim": 8},
    {"head_dim": 80},
    {"head_dim": 100},
    {"head_dim": 264},
    {"head_dim": 584},
    {"head_dim": 192, "value_head_dim": 128},
    {"head_dim": 576, "value_head_dim": 512},
    {"block_size": 1},
    {"block_size": 7},
    {"block_size": 2**20},
    {"block_size": 0},
    {"dtype": "int8"},
    {"dtype": "float64"},
)


def tables() -> str:
    """Both tables in Markdown."""
    lines = ["| query | " + " | ".join(CACHE_DTYPES) + " |", "|---" * (len(CACHE_DTYPES) + 1) + "|"]
    for dtype in QUERY_DTYPES:
        taken = [
            paged_ops.supports(**PLAIN | {"dtype": dtype, "cache_dtype": cache}) for cache in CACHE_DTYPES
        ]
        lines.append(f"| {dtype} | " + " | ".join("yes" if x else "-" for x in taken) + " |")
    lines += ["", "| shape | taken? |", "|---|---|"]
    for changes in TRIED:
        shape = ", ".join(f"{name} {value}" for name, value in changes.items())
        support = paged_ops.supports(**PLAIN | changes)
        lines.append(f"| {shape} | {'yes' if support else support.reason} |")
    return "\n".join(lines)


def page_with(tables: str) -> str:
    """The page with these tables in the place of those that it has."""
    pattern = re.escape(BEGIN) + r".*?" + re.escape(END)
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{tables}\n\n{END}", PAGE.read_text(), flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="update docs/ops.md")
    if parser.parse_args().write:
        PAGE.write_text(page_with(tables()))
    else:
        print(tables())


if __name__ == "__main__":
    main()
