"""Stop strings: ends a text before the first of them, also where one is spread over several tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Takes a text piece by piece and lets through what can no longer be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is certain with `piece`; sets `found` once a stop string is complete."""
        text = self._held + piece
        ends = [end for end in map(text.find, self._stops) if end >= 0]
        if ends:
            self._held, self.found = "", True
            return text[: min(ends)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
