"""Ctrl-C as a question between steps: the first one asks to stop, a second one interrupts at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

EXIT_USAGE = 2  # the user asked for what cannot be
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Within the block the first SIGINT sets the event that this yields."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's alone
        yield asked
        return

    def ask(signum: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
