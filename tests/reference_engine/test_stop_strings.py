"""Stop strings over every way to cut a text into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reference_engine.stop_strings import StopStrings

few_letters = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(few_letters, max_size=3))
def test_any_cut_gives_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    whole, matcher, out = "", StopStrings(stops), ""
    for piece in pieces:
        whole += piece
        out += matcher.push(piece)
        found = [whole.find(stop) for stop in stops if stop in whole]
        assert matcher.found == bool(found)
        if found:
            assert out == whole[: min(found)]
            return
        # What is held back is no more than it has to be: it could still become a stop string.
        held = whole[len(out) :]
        assert whole.startswith(out) and (not held or any(stop.startswith(held) for stop in stops))
    assert out + matcher.finish() == whole


def test_of_two_that_end_together_the_one_that_begins_first_counts() -> None:
    matcher = StopStrings(("b", "ab"))
    assert matcher.push("xa") == "x"
    assert matcher.push("b") == "" and matcher.found
