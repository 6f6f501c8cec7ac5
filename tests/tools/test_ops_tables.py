"""The tables of docs/ops.md are what `supports()` says, and its sections are the public ops."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import paged_ops

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ops.md").read_text()


def test_the_tables_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "ops_tables.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| bfloat16 |" in printed and printed.strip() in PAGE, "python tools/ops_tables.py --write"


def test_every_public_op_has_a_section() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^### (.*)$", PAGE, re.MULTILINE))))
    functions = {name for name in paged_ops.__all__ if callable(getattr(paged_ops, name))}
    helpers = {"get_num_threads", "set_num_threads", "KVPool", "Support"}
    assert functions - helpers <= named, functions - helpers - named
    assert named <= functions
