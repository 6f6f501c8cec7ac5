"""A bar chart in SVG, written by hand: for each case our share of the limit and each peer's."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

_COLOURS = ("#2563a8", "#d9822b", "#5b9a5b", "#a65bb0", "#8a8a8a", "#c2453d")
_MOST = 1.15  # where bars are cut off; their number still tells
_BAR, _GAP, _LEFT, _SCALE, _TOP = 13, 12, 250, 4.6, 56


def bars(told: dict[str, Any]) -> str:
    """Percent of each row's first limit, ours and the peers'; rows without a limit are left out."""
    groups = [_shares(row, told["peers"]) for row in told["rows"] if row["verified"] and row["limits"]]
    names = list(dict.fromkeys(name for _, shares in groups for name in shares))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    width, y, body = int(_LEFT + 100 * _MOST * _SCALE + 40), _TOP, []
    for label, shares in groups:
        middle = y + _BAR * len(shares) / 2 + 4
        body.append(f'<text x="{_LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>')
        for name, share in shares.items():
            length = min(share, _MOST) * 100 * _SCALE
            body.append(
                f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR - 2}" fill="{colours[name]}"/>'
                f'<text x="{_LEFT + length + 4:.0f}" y="{y + 9}" class="small">{100 * share:.0f}</text>'
            )
            y += _BAR
        y += _GAP
    legend, x = [], 8
    for name, colour in colours.items():
        legend.append(f'<rect x="{x}" y="26" width="10" height="10" fill="{colour}"/>')
        legend.append(f'<text x="{x + 14}" y="35">{escape(name)}</text>')
        x += 30 + 7 * len(name)
    grid = [
        f'<line x1="{_LEFT + at * _SCALE:.0f}" y1="{_TOP - 6}" x2="{_LEFT + at * _SCALE:.0f}" y2="{y}"/>'
        f'<text x="{_LEFT + at * _SCALE:.0f}" y="{_TOP - 9}" text-anchor="middle" class="small">{at}%</text>'
        for at in (0, 25, 50, 75, 100)
    ]
    width = max(width, x)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 8}" '
            f'viewBox="0 0 {width} {y + 8}">',
            "<style>text{font:11px sans-serif}.small{font-size:9px}line{stroke:#ccc}</style>",
            f'<rect width="{width}" height="{y + 8}" fill="white"/>',
            '<text x="8" y="16">Percent of the limit measured in the same run (higher is better)</text>',
            *legend,
            *grid,
            *body,
            "</svg>",
            "",
        ]
    )


def _shares(row: dict[str, Any], known_peers: list[str]) -> tuple[str, dict[str, float]]:
    ratios = {name: spread["median"] for name, spread in row["ratios"].items()}
    own = ratios[row["limits"][0]]
    peers = {name: own / ratio for name, ratio in ratios.items() if name.split()[0] in known_peers}
    return f"{row['suite']} {row['case']} {row['variant']}", {"ours": own} | peers
