"""The demo: one small model answers several people at once, beside a live map of the blocks it uses."""

from __future__ import annotations

import contextlib
import time

from rich.console import Console
from rich.live import Live

from reference_engine.demo_view import View
from reference_engine.engine import Engine
from reference_engine.interrupt import EXIT_INTERRUPTED, EXIT_USAGE, interrupts
from reference_engine.models.loader import load_model
from reference_engine.talk import Talk

TEACHER = (
    "You are a patient teacher. Explain things to a curious child in two or three short sentences, "
    "with simple words and one example from everyday life."
)


def company() -> list[Talk]:
    """Who is talking. Each is there to show something of the engine."""
    return [
        Talk(
            "A",
            "cyan",
            ["Give me three tips for a good night's sleep.", "Which of the three matters most, and why?"],
            note="two turns: the second finds the first in the cache",
        ),
        Talk("B", "green", ["What makes a rainbow?"], "shares a system prompt with C", TEACHER),
        Talk("C", "yellow", ["Why do we sleep?"], "shares a system prompt with B", TEACHER),
        Talk(
            "D",
            "magenta",
            ["Write one sentence about a fox who finds an old umbrella."],
            note="three samples of one prompt, which they share",
            samples=3,
        ),
        Talk("E", "blue", ["Explain in two sentences why the sky is blue."]),
    ]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader has gone: the command line knows what that means, rich would exit with 1."""
        raise BrokenPipeError


def run_demo(model_name: str = "smollm2", *, max_tokens: int = 96, num_blocks: int = 40) -> int:
    """Run the demo on standard output; returns the exit code."""
    console = _Console(highlight=False)
    started = time.monotonic()
    with console.status(f"Loading {model_name}") if console.is_terminal else contextlib.nullcontext():
        model = load_model(model_name)
    # From here on Ctrl-C means: end with a summary of what there is.
    with interrupts() as interrupted:
        console.print(f"Loaded {model.name} in {time.monotonic() - started:.1f} s.", style="dim")
        engine = Engine(model, num_blocks=num_blocks)
        talks = company()
        for talk in talks:
            talk.ask(engine, max_tokens)
        view = View(console, engine, talks)
        with _screen(view) as screen:
            while engine.has_work and not interrupted.is_set():
                ended = {piece.completion.request_id for piece in engine.step() if piece.finished}
                view.observe()
                for talk in talks:
                    if talk.latest and talk.latest[0].request_id in ended and talk.has_answer:
                        if not talk.is_over:
                            talk.ask(engine, max_tokens)
                        if talk.is_over and screen is None:
                            view.transcript(talk)
                if screen is not None:
                    screen.update(view.live(), refresh=True)
    for talk in talks:
        if view.on_screen or not talk.turns or not talk.is_over:
            view.transcript(talk)
    if any(talk.turns for talk in talks):
        view.close()
    if interrupted.is_set():
        return EXIT_INTERRUPTED
    return EXIT_USAGE if any(talk.refusal for talk in talks) else 0


def _screen(view: View) -> contextlib.AbstractContextManager[Live | None]:
    """The live view on a terminal; elsewhere talks are printed as they end."""
    if not view.on_screen:
        return contextlib.nullcontext()
    return Live(console=view.console, auto_refresh=False, transient=True)
