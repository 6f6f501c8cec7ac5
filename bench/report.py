"""The rows of a run for people: a table per suite, and the goals beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def table(header: list[str], lines: Iterable[list[str]]) -> str:
    """Markdown, padded so that it also reads well in a terminal."""
    lines = [header, *lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    texts = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts)


def rows_table(rows: list[Row]) -> str:
    """Times, bytes per second, percent of each limit, and how many times as long each peer takes."""
    timed = [row for row in rows if row["verified"]]
    limits = _in_order(name for row in timed for name in row["limits"])
    peers = _in_order(name for row in timed for name in row["ratios"] if name not in row["limits"])
    header = [
        "case",
        "variant",
        "disturbed",
        "us (quartiles)",
        "MiB",
        "GB/s",
        "TFLOP/s",
        *(f"% of {name}" for name in limits),
    ]
    header += [f"{name} / ours" for name in peers]
    lines = []
    for row in rows:
        line = [row["case"], row["variant"], f"{100 * row['disturbed']:.0f}%"]
        if not row["verified"]:
            lines.append([*line, f"WRONG: {row['complaint'][:60]}", *[""] * (len(header) - 4)])
            continue
        seconds, ratios = row["seconds"], row["ratios"]
        line.append(
            "{:.4g} ({:.4g} to {:.4g})".format(*(1e6 * seconds[key] for key in ("median", "q1", "q3")))
        )
        line += [f"{row['nbytes'] / 2**20:.4g}" if row["nbytes"] else "", f"{row['gb_per_s']:.3g}"]
        line.append(f"{row['tflops']:.3g}" if "tflops" in row else "")
        line += [_spread(ratios[name], 100, ".0f") if name in ratios else "" for name in limits]
        line += [_spread(ratios[name], 1, ".2f") if name in ratios else "" for name in peers]
        lines.append(line)
    used = [i for i in range(len(header)) if i < 3 or any(line[i] not in ("", "0") for line in lines)]
    return table([header[i] for i in used], [[line[i] for i in used] for line in lines])


def goals_table(rows: list[Row]) -> str:
    """Each goal with its measure: median over the rounds, quartiles, and the metric of the best times.

    DISTURBED: too few rounds were free of others' work, so all were taken; do not trust it.
    """
    lines = []
    for row in rows:
        for goal in row.get("goals", []):
            measured = goal["measured"]
            least = goal["at_least"] is not None
            bound = goal["at_least"] if least else goal["at_most"]
            lines.append(
                [
                    goal["work"],
                    f"{row['case']} {row['variant']}",
                    goal["metric"],
                    f"{'>=' if least else '<='} {_number(bound)}",
                    f"{_number(measured['median'])} ({_number(measured['q1'])} to {_number(measured['q3'])})",
                    _number(goal["of_best"]),
                    str(goal["rounds"]),
                    ("met" if goal["met"] else "NOT MET") + (", DISTURBED" if goal["disturbed"] else ""),
                ]
            )
    header = ["work", "case", "metric", "goal", "median (quartiles)", "of best times", "rounds", ""]
    return table(header, lines)


def problems(rows: list[Row]) -> list[str]:
    """What was wrong, of ours and of peers, once each."""
    found = [f"{r['suite']} {r['case']} {r['variant']}: {r['complaint']}" for r in rows if not r["verified"]]
    for row in rows:
        found += [f"{row['suite']} {row['case']}: {name}: {why}" for name, why in row["wrong_peers"].items()]
    return _in_order(found)


def _spread(spread: dict[str, float], factor: float, form: str) -> str:
    median, q1, q3 = (format(factor * spread[key], form) for key in ("median", "q1", "q3"))
    return f"{median} ({q1} to {q3})"


def _number(value: float) -> str:
    return f"{value * 1e6:.3g} us" if abs(value) < 1e-3 else f"{value:.3g}"


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
