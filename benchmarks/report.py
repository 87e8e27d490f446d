"""Results as text and as SVG. A result is compare.py's JSON: the machine, the reference peer, one
row per measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from html import escape
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]

COLUMNS = {
    "CPU us/request": ("us_request", "{:.0f}"),
    "CPU us/chunk": ("us_chunk", "{:.1f}"),
    "events per read": ("events_per_read", "{:.2f}"),
    "first p50 ms": ("first_p50_ms", "{:.1f}"),
    "gap p50 ms": ("gap_p50_ms", "{:.1f}"),
    "gap p99 ms": ("gap_p99_ms", "{:.1f}"),
    "RSS MB": ("rss_mb", "{:.0f}"),
    "split P/D": ("split", "{:.2f}"),
}
COLOURS = ("#2f6f9f", "#d9822b", "#5b8c5a", "#8c5b86", "#777777")


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def groups(result: Result) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of each load and peer; loads are sorted, peers keep their order."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(result["rows"], key=lambda row: str(row["load"])):
        found.setdefault((row["load"], row["peer"]), []).append(row)
    return found


def ratio(result: Result, load: str, peer: str) -> float | None:
    """Return the median over the rounds of the ratio of a peer's CPU time to the reference's in the
    same round.
    """
    base = {
        row["round"]: row["us_request"]
        for row in groups(result).get((load, result["reference"]), [])
    }
    mine = groups(result).get((load, peer), [])
    return median(
        row["us_request"] / base[row["round"]]
        for row in mine
        if "us_request" in row and row["round"] in base
    )


def describe(machine: dict[str, Any]) -> str:
    """Describe the machine in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"commit {machine['commit']}; {machine['date']}; {machine['cores']} cores of "
        f"{machine['cpu']}, "
        f"Linux {machine['kernel']}, "
        f"Python {machine['python']}, {packages}; load average at the start "
        f"{machine['load_average']}"
    )


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def table(result: Result) -> str:
    """Return medians over the rounds, one row per load and peer."""
    rows = []
    for (load, peer), measured in groups(result).items():
        against = ratio(result, load, peer)
        cells = [load, peer, "" if against is None else f"{against:.2f}"]
        for key, shape in COLUMNS.values():
            value = median(row.get(key) for row in measured)
            cells.append("" if value is None else shape.format(value))
        rows.append([*cells, str(sum(row["errors"] for row in measured))])
    return _table(["load", "proxy", f"x {result['reference']}", *COLUMNS, "errors"], rows)


def against(old: Result, new: Result) -> str:
    """Return two results side by side: the CPU time of each, and how the ratio to the reference has
    changed.
    """
    rows = []
    for load, peer in groups(new):
        then, now = (groups(one).get((load, peer)) for one in (old, new))
        values = [median(row.get("us_request") for row in rows_of or []) for rows_of in (then, now)]
        ratios = [ratio(one, load, peer) for one in (old, new)]
        if None in values:
            continue
        cells = [load, peer, *(f"{value:.0f}" for value in values), f"{_over(values):.2f}"]
        moved = "" if None in ratios else f"{_over(ratios):.2f}"
        rows.append([*cells, *("" if value is None else f"{value:.2f}" for value in ratios), moved])
    reference = f"x {new['reference']}"
    head = [
        "load",
        "proxy",
        "us/request, old",
        "new",
        "new to old",
        f"{reference}, old",
        "new",
        "new to old",
    ]
    return _table(head, rows)


def _over(pair: list[float | None]) -> float:
    old, new = pair
    return (new or 0.0) / (old or 1.0)


def plot(result: Result) -> str:
    """Return the ratios to the reference as bars in SVG, one group per load."""
    loads = list(dict.fromkeys(load for load, _ in groups(result)))
    peers = list(dict.fromkeys(peer for _, peer in groups(result)))
    bars = [
        (load, peer, value)
        for load in loads
        for peer in peers
        if (value := ratio(result, load, peer)) is not None
    ]
    shown = [peer for peer in peers if any(peer == bar[1] for bar in bars)]
    widest = max((value for *_, value in bars), default=1.0)
    scale, bar, top = 420 / widest, 18, 60
    parts, y, last = [], top, ""
    for load, peer, value in bars:
        if load != last:
            y += 10 if last else 0
            parts.append(f'<text x="130" y="{y + 13}" text-anchor="end">{escape(load)}</text>')
            last = load
        colour = COLOURS[shown.index(peer) % len(COLOURS)]
        parts.append(
            f'<rect x="140" y="{y}" width="{value * scale:.1f}" height="{bar - 3}" '
            f'fill="{colour}"/>'
        )
        parts.append(f'<text x="{146 + value * scale:.1f}" y="{y + 12}">{value:.2f}</text>')
        y += bar
    for index, peer in enumerate(shown):
        x = 140 + 150 * index
        parts.append(
            f'<rect x="{x}" y="32" width="12" height="12" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{x + 18}" y="42">{escape(peer)}</text>')
    one = 140 + scale
    parts.append(
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{top - 6}" y2="{y}" stroke="#000" '
        f'stroke-dasharray="3 3"/>'
    )
    title = f"CPU time per request, {escape(result['reference'])} = 1"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{y + 20}" '
        f'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="140" y="20" '
        f'font-size="14">{title}</text>'
        f"{''.join(parts)}</svg>\n"
    )
