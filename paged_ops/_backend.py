"""Which native module serves the ops, and the defaults that the environment sets."""

from __future__ import annotations

import os
from typing import Any

from paged_ops import _main_interpreter as _main_interpreter
from paged_ops import _native

# `paged_ops.testing.use_backend` replaces it; nothing else does.
module: Any = _native

# With PAGED_OPS_CHECK=1 block ids and slots are checked on CUDA too, at the price of a synchronisation per
# call.
check_by_default: bool = os.environ.get("PAGED_OPS_CHECK", "0") not in ("", "0")
