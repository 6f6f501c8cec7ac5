"""Programs linked with the launch code. The toolchain is the emulator tests' own."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "tests" / "simt"), str(REPOSITORY / "tools")]
