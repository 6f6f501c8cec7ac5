"""What a caller may ask of sampling and stopping: one validated record per request (stdlib only)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

MAX_SAMPLES = 1024  # of one request: what one prompt may ask of memory and time
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    The distribution of a token is built in this order (exactly, with ties: `reference_engine.sampler`):
    logits / temperature -> the `top_k` most probable -> the smallest set that reaches `top_p` -> tokens of at
    least `min_p` times the largest probability -> renormalised.

    Args:
        temperature: 0 means greedy (the largest logit, the lowest id on a tie); else finite and positive.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: nucleus mass in (0, 1]; 1 keeps all.
        min_p: fraction of the largest probability in [0, 1]; 0 keeps all.
        seed: 0 .. 2**64 - 1. With the same seed a request gives the same tokens in any batch and schedule.
            None lets the engine choose one per request.
        max_tokens: end after this many generated tokens, at least 1.
        stop: strings that end the text; the text is cut before the first of them. One string, or several.
        stop_token_ids: token ids that end generation, besides the model's own end-of-sequence ids.
        ignore_eos: go on after the model's end-of-sequence ids (`stop` and `stop_token_ids` still count).
        n: number of samples drawn from the one prompt, each with its own random numbers; at most MAX_SAMPLES.
        logprobs: also report each chosen token's natural-log probability under the model's own distribution,
            before temperature and truncation.

    Raises:
        TypeError, ValueError: naming the field, what came and what was wanted.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            self._set(name, _real(name, getattr(self, name)))
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

        self._set("top_k", _integer("top_k", self.top_k, minimum=0))
        self._set("max_tokens", _integer("max_tokens", self.max_tokens, minimum=1))
        self._set("n", _integer("n", self.n, minimum=1, maximum=MAX_SAMPLES))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, minimum=0, maximum=_MAX_SEED))

        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _integers("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        """Whether the choice needs no random number."""
        return self.temperature == 0

    def _set(self, name: str, value: object) -> None:
        # The record is frozen for its users; this is the one place that stores a normalised field.
        object.__setattr__(self, name, value)


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def _integer(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        wanted = f"at least {minimum}" if maximum is None else f"in {minimum}..{maximum}"
        raise ValueError(f"{name} must be {wanted}, got {number}")
    return number


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _items(name, value)
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"{name} must be a string or strings, got {item!r} in it")
        if not item:
            raise ValueError(f"{name} must not contain an empty string, which every text contains")
    return items


def _integers(name: str, value: object) -> tuple[int, ...]:
    return tuple(_integer(f"{name}[{i}]", item, minimum=0) for i, item in enumerate(_items(name, value)))


def _items(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list or tuple, got {value!r}")
    return tuple(value)
