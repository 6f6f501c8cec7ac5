"""Programs compiled with the launch code once per session. The toolchain is the emulator tests' own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simt"))
