"""Calls of public ops whose errors name the arguments as vLLM's callers know them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any


def call(op: Callable[..., Any], *args: Any, names: Mapping[str, str] | None = None, **options: Any) -> Any:
    """``op(*args, **options)``; names: the op's argument -> vLLM's, where they differ.

    Errors say which op they come from: what it refuses is often a limit of ours that vLLM does not have.
    """
    try:
        return op(*args, **options)
    except (TypeError, ValueError) as error:
        text = str(error)
        for own, theirs in (names or {}).items():
            text = re.sub(rf"(^|\bas |\bas in ){re.escape(own)}(?!\w)", rf"\g<1>{theirs}", text)
        raise type(error)(f"{text} (from paged_ops.{op.__name__})") from None
