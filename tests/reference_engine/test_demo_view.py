"""The live view of the demo fits its terminal and shows what the pool holds."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from tiny import save_checkpoint

from reference_engine.demo import company
from reference_engine.demo_view import View
from reference_engine.engine import Engine
from reference_engine.models.loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint("llama", folder)
    return load_model(folder)


def view_of(model: LoadedModel, width: int, height: int, num_blocks: int, *, colours: bool = True) -> View:
    console = Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=True,
        no_color=not colours,
        _environ={"TERM": "xterm"},
    )
    engine = Engine(model, num_blocks=num_blocks)
    view = View(console, engine, company())
    for talk in view.talks:
        talk.ask(engine, max_tokens=40)
    return view


def screen(view: View) -> list[str]:
    lines = view.console.render_lines(view.live(), pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def map_of(view: View) -> list[str]:
    return [cell for line in screen(view) if line.startswith("│") for cell in line.strip("│").split()]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 30)])
@pytest.mark.parametrize("num_blocks", [40, 90])
def test_it_fits_at_every_step(model: LoadedModel, width: int, height: int, num_blocks: int) -> None:
    view = view_of(model, width, height, num_blocks)
    sizes = set()
    while view.engine.has_work:
        view.engine.step()
        lines = screen(view)
        assert all(cell_len(line) <= width for line in lines)
        sizes.add(len(lines))
    assert max(sizes) < height
    assert len(sizes) <= 2  # nothing jumps, but for the samples that join once their prompt is computed


def test_the_map_tells_shared_used_known_and_free_blocks(model: LoadedModel) -> None:
    view = view_of(model, 120, 40, 90)
    assert any("· · · ·" in line for line in screen(view))
    for _ in range(3):
        view.engine.step()
    shared = sum(cell.shared for cell in view._map_cells())
    assert shared > 3 and f"{shared} shared" in screen(view)[-1]
    for _ in view.engine.stream():
        pass
    cells = map_of(view)
    assert "█" not in cells and cells.count("░") == view.engine.scheduler.pool.num_cached > 0


def test_without_colours_letters_and_numbers_tell_the_same(model: LoadedModel) -> None:
    view = view_of(model, 120, 40, 90, colours=False)
    for _ in range(4):
        view.engine.step()
    cells = map_of(view)
    assert len(cells) == 90 and {"A", "B", "C", "D", "E", "3", "."} <= set(cells)
    assert "letter: held by that talk" in screen(view)[-2]
