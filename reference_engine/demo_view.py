"""The demo's looks: conversations as they grow, beside a map of the blocks that they use."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from reference_engine.engine import Completion, Engine
from reference_engine.pool_map import Cell, pool_map
from reference_engine.report import LABEL_WIDTH, summary
from reference_engine.request import FinishReason
from reference_engine.talk import Talk

LEVELS = "▁▂▃▄▅▆▇█"  # how full a block is


class View:
    """What the demo prints: `live` while it runs on a terminal, the rest to stay."""

    def __init__(self, console: Console, engine: Engine, talks: Sequence[Talk]) -> None:
        self.console, self.engine, self.talks = console, engine, talks
        self.on_screen = console.is_terminal and not console.is_dumb_terminal
        self.started = time.monotonic()
        self._fullest: list[Cell] = []

    def observe(self) -> None:
        """Remember the pool when most of it is in use."""
        cells = self._map_cells()
        if sum(bool(cell.holders) for cell in cells) > sum(bool(cell.holders) for cell in self._fullest):
            self._fullest = cells

    # ---- while it runs

    def live(self) -> RenderableType:
        """One screenful: the ends of all answers, as many lines each as there is room for, and the pool."""
        width, height = self.console.size
        answers = [(talk, completion) for talk in self.talks for completion in talk.latest]
        pool = Panel(
            Group(*self._map_lines(self._map_cells(), width - 4)),
            title=self._map_title(),
            border_style="dim",
        )
        # Besides: a rule, the legend, the status, the panel's borders and the line of the cursor.
        room = height - 6 - self._num_map_lines(width - 4)
        lines_each = max(1, room // max(1, len(answers)))
        return Group(
            Rule(f"[bold]{self.engine.model.name}[/] answers {len(self.talks)} people at once"),
            *(self._tail(talk, completion, width, lines_each) for talk, completion in answers),
            pool,
            self._legend(),
            self._status(),
        )

    def _tail(self, talk: Talk, completion: Completion, width: int, num_lines: int) -> Text:
        """The last lines of an answer, behind its label."""
        indent = 6
        words = Text(" ".join(_visible(completion.text).split()))
        lines = list(words.wrap(self.console, max(10, width - indent - 1)))[-num_lines:]
        mark = "…" if completion.finish_reason is None else "✓"
        tail = Text(f" {talk.name_of(completion):<2} {mark} ", style=talk.colour, no_wrap=True)
        for number in range(num_lines):
            tail.append(("\n" + " " * indent) if number else "")
            tail.append(lines[number].plain.rstrip() if number < len(lines) else "", style="default")
        return tail

    def _status(self) -> Text:
        scheduler, pool = self.engine.scheduler, self.engine.scheduler.pool
        shared = sum(cell.shared for cell in pool_map(scheduler))
        generated = sum(len(completion.token_ids) for talk in self.talks for completion in talk.completions)
        speed = generated / max(time.monotonic() - self.started, 1e-9)
        return Text(
            f" {len(scheduler.running)} running, {len(scheduler.waiting)} waiting · "
            f"{pool.num_used} blocks in use, {shared} shared · {speed:.0f} tokens/s",
            style="dim",
            no_wrap=True,
        )

    # ---- the map

    def _map_cells(self) -> list[Cell]:
        return pool_map(self.engine.scheduler)

    def _map_title(self) -> str:
        config = self.engine.scheduler.config
        return f"KV pool: {config.num_blocks} blocks of {config.block_size} tokens"

    def _num_map_lines(self, width: int) -> int:
        return -(-self.engine.scheduler.config.num_blocks * 2 // width)

    def _map_lines(self, cells: Sequence[Cell], width: int) -> list[Text]:
        """The cells in rows of equal length, two columns each."""
        num_rows = self._num_map_lines(width)
        per_row = -(-len(cells) // num_rows)
        rows = [cells[start : start + per_row] for start in range(0, len(cells), per_row)]
        return [Text(" ", no_wrap=True).join(self._cell(cell) for cell in row) for row in rows]

    def _cell(self, cell: Cell) -> Text:
        """In colours the height says how full a block is; without, a letter or a number who holds it."""
        colours = self._colours
        if not cell.holders:
            known, free = ("░", "·") if colours else ("+", ".")
            return Text(known if cell.cached else free, style="dim")
        talk = next(t for t in self.talks if cell.holders[0].request.id in t.request_ids)
        if not colours:
            return Text(str(min(9, len(cell.holders))) if cell.shared else talk.label)
        level = LEVELS[min(len(LEVELS) - 1, int(cell.filled * len(LEVELS)))]
        return Text(level, style="bold white" if cell.shared else talk.colour)

    def _legend(self) -> Text:
        if not self._colours:
            return Text(" letter: held by that talk, digit: shared by so many, +: free but known, .: free")
        holders = [Text(f"█ {talk.label}", style=talk.colour) for talk in self.talks]
        others = [
            Text("█ shared", style="bold white"),
            Text("░ free but known", style="dim"),
            Text("· free", style="dim"),
        ]
        return Text(" ") + Text("  ").join([*holders, *others])

    @property
    def _colours(self) -> bool:
        return self.on_screen and not self.console.no_color

    # ---- what stays

    def transcript(self, talk: Talk) -> None:
        """A talk in full."""
        self.console.print(
            Text.assemble(
                (talk.label, f"bold {talk.colour}"), (f" ({talk.note})" if talk.note else "", "dim")
            )
        )
        for question, completions in zip(talk.questions, talk.turns, strict=False):
            self._print(Text(question, style="italic"), 2)
            for completion in completions:
                self._print(self._said(talk, completion), 4)
        if talk.refusal:
            self._print(Text(f"refused: {talk.refusal}", style="red"), 2)

    def _said(self, talk: Talk, completion: Completion) -> Text:
        said = Text(f"{completion.sample_index + 1}. " if talk.samples > 1 else "", style=talk.colour)
        said.append(_visible(completion.text).strip(), style="default")
        if completion.finish_reason is FinishReason.LENGTH:
            said.append(" …", style="dim")
        elif completion.finish_reason is FinishReason.ERROR:
            said.append(f" [{completion.error}]", style="red")
        elif completion.finish_reason is None:
            said.append(" [interrupted]", style="dim")
        return said

    def close(self) -> None:
        """The fullest map, and the figures."""
        seconds = time.monotonic() - self.started
        if self._fullest:
            self.console.print(Rule(f"{self._map_title()}, at its fullest", style="dim"))
            for line in self._map_lines(self._fullest, self.console.width - 4):
                self._print(line, 1)
            self.console.print(self._legend())
        self.console.print(Rule("Summary", style="dim"))
        completions = [completion for talk in self.talks for completion in talk.completions]
        for label, value in summary(self.engine, completions, seconds):
            self._print(Text.assemble((f"{label:<{LABEL_WIDTH}}", "bold"), value), 1)

    def _print(self, what: RenderableType, indent: int) -> None:
        self.console.print(Padding(what, (0, 0, 0, indent), expand=False))


def _visible(text: str) -> str:
    """Without control characters, which a model may well produce and a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "\ufffd" for c in text)
