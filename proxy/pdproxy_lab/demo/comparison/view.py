"""Renders the comparison: lines for a terminal of any size, one line otherwise. Pure.

Owns layout and units. 80 columns and 24 rows have room for everything; more rows make the curves
higher, fewer leave out what matters least. No line is longer than the terminal is wide.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from pdproxy_lab.demo.comparison.scores import Score, Spread
from pdproxy_lab.demo.comparison.verdict import Verdict
from pdproxy_lab.demo.counted import counted

State = Literal["up", "slow", "killed", "not used", "unknown"]
KEYS = "1-{count} engine  k kill/start  s slow  +/- load  l limits  a auto  q end"
_LABEL, _VALUE, _GAP = 14, 12, 2
_HIGHEST = 7
"""Rows of a curve."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = ("cyan", "yellow")
_STATES: dict[State, str] = {
    "up": "green",
    "slow": "yellow",
    "killed": "bold red",
    "not used": "magenta",
    "unknown": "dim",
}
_VERDICTS = {
    "busy": "bold red",
    "better": "bold green",
    "worse": "bold yellow",
    "same": "bold",
    "neither": "bold",
}


@dataclass(frozen=True, slots=True)
class ComparedEngine:
    """An engine: its name, its state, requests that run and wait there; None: not known."""

    name: str
    state: State
    running: int | None
    waiting: int | None


@dataclass(frozen=True, slots=True)
class Side:
    """One fleet. `curve`: its scores, the newest last."""

    title: str
    score: Score
    curve: Sequence[Score]
    engines: Sequence[ComparedEngine]
    answered: int
    failed: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that is shown at one time. `elapsed`: seconds since the command was entered;
    `rate`: requests per second of engine time; `curl`: makes the command's lines for a width;
    `chosen`: an engine's number, from 0.
    """

    elapsed: float
    rate: float
    limits: str
    speed: float
    split: Side
    plain: Side
    verdict: Verdict
    news: str
    curl: Callable[[int], Sequence[str]]
    chosen: int = 0
    keys: bool = True
    left_out: int = 0

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both fleets."""
        return self.split, self.plain


@dataclass(frozen=True, slots=True)
class _Metric:
    label: str
    shown: Callable[[Score], str]
    value: Callable[[Score], float | None]
    """What the curve shows."""


def _pair(spread: Spread) -> str:
    return f"{milliseconds(spread.p50)}/{milliseconds(spread.p99)}"


_METRICS = (
    _Metric(
        "in time ▲",
        lambda score: "-" if score.share is None else f"{score.share:.0%} {score.good_per_s:.1f}/s",
        lambda score: score.good_per_s if score.share is not None else None,
    ),
    _Metric("TTFT p50/99 ▼", lambda score: _pair(score.ttft), lambda score: score.ttft.p99),
    _Metric("TPOT p50/99 ▼", lambda score: _pair(score.tpot), lambda score: score.tpot.p99),
    _Metric("ITL p50/99 ▼", lambda score: _pair(score.itl), lambda score: score.itl.p99),
    _Metric(
        "worst gap ▼", lambda score: milliseconds(score.worst_gap), lambda score: score.worst_gap
    ),
)


def render(picture: Picture, *, width: int, height: int) -> list[Text]:
    """Return the lines for a terminal of so many columns and rows, `height` at most."""
    curl = [Text(line) for line in picture.curl(width)]
    words = _wrapped(picture.verdict.text, width, 3, _VERDICTS.get(picture.verdict.kind, "dim"))
    news = _wrapped(picture.news, width, 3 if height > 24 else 2, "")
    keys = _keys(picture, width)
    fixed = [_title(picture, width), *_setting(picture), _heads(picture, width)]
    few = len(fixed) + len(_METRICS) + 2 + len(words) + len(news) + len(keys) + len(curl)
    detailed = height - few >= 3 + len(picture.split.engines)
    engines = _engines(picture, width) if detailed else [_engines_in_short(picture, width)]
    spare = height - few - len(engines) + 1 - (4 if detailed else 0)
    rows = min(_HIGHEST, 1 + max(spare, 0) // len(_METRICS))
    curves = [line for metric in _METRICS for line in _curve(picture, metric, width, rows)]
    space = [Text()] if detailed or spare > 0 else []
    more = [Text()] if detailed else []
    lines = [*fixed, *curves, *engines, _answered(picture, width), *space, *words, *more, *news]
    # Of a terminal that is too small, the middle is left out: the verdict and the command stay.
    tail = [*more, *keys, *curl]
    if len(tail) > height // 2:
        tail = keys
    kept = max(height - len(tail), 0)
    if len(lines) > kept:
        must = [fixed[-1], *[_curve(picture, one, width, 1)[0] for one in _METRICS], *words]
        lines = must[:kept] if len(must) >= kept else [*fixed[: kept - len(must)], *must]
    found = [*lines, *tail][:height]
    for line in found:
        line.truncate(width)
        line.no_wrap = True
    return found


def line(picture: Picture) -> str:
    """Return the figures as one line of plain text."""
    up = sum(one.state in ("up", "slow") for side in picture.sides for one in side.engines)
    engines = sum(len(side.engines) for side in picture.sides)
    parts = [f"{picture.elapsed:.0f} s", f"engines {up}/{engines} up", f"{picture.rate:g} req/s"]
    for side in picture.sides:
        shown = (f"{metric.label.rstrip(' ▲▼')} {metric.shown(side.score)}" for metric in _METRICS)
        parts.append(
            f"| {side.title}: {', '.join(shown)}, answered {side.answered}, failed {side.failed}"
        )
    return " ".join(parts)


def milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.1f}" if seconds < 0.01 else f"{1000 * seconds:.0f}"


def setting(picture: Picture) -> tuple[str, str]:
    """Return what is compared, in two lines: the load, and what the times are."""
    return (
        f"{picture.rate:g} req/s of 4,000 tokens in, 128 out. In time: {picture.limits}.",
        f"Simulated, times of an H200 with an 8B model; {1 / picture.speed:g} times slower here.",
    )


def _title(picture: Picture, width: int) -> Text:
    text = Text("pdproxy demo", "bold")
    text.append("  the same requests to split and to plain engines")
    elapsed = f"{picture.elapsed:.0f} s"
    return text.append(elapsed.rjust(max(width - len(text), len(elapsed) + 1)))


def _setting(picture: Picture) -> list[Text]:
    load, times = setting(picture)
    lines = [Text(load), Text(times, "dim")]
    if picture.left_out:
        lines[1] = Text(
            f"{counted(picture.left_out, 'request')} left out: too many wait.", "bold red"
        )
    return lines


def _heads(picture: Picture, width: int) -> Text:
    text = Text().append("ms".ljust(_LABEL), "dim")
    for side, colour in zip(picture.sides, _COLOURS, strict=True):
        text.append(side.title[: _half(width)].ljust(_half(width)), f"bold {colour}")
    return text


def _half(width: int) -> int:
    return max((width - _LABEL) // 2, 1)


def _curve(picture: Picture, metric: _Metric, width: int, rows: int) -> list[Text]:
    cells = max(_half(width) - _VALUE - _GAP, 0)
    values = [[metric.value(score) for score in side.curve][-cells:] for side in picture.sides]
    highest = max((value for side in values for value in side if value is not None), default=0.0)
    lines = []
    for row in range(rows):
        line = Text().append((metric.label if row == 0 else "").ljust(_LABEL), "dim")
        for side, found, colour in zip(picture.sides, values, _COLOURS, strict=True):
            shown = metric.shown(side.score) if row == 0 else ""
            line.append(shown[:_VALUE].ljust(_VALUE), "bold")
            blocks = "".join(_block(value, highest, rows, row) for value in found)
            line.append(blocks.rjust(cells) + " " * _GAP, colour)
        lines.append(line)
    return lines


def _block(value: float | None, highest: float, rows: int, row: int) -> str:
    """Return the part of a column of blocks that is in a row, 0 being the top one."""
    if value is None or highest <= 0:
        return " "
    # an eighth stays free, so that the curve above does not touch this one
    eighths = max(round((8 * rows - 1) * value / highest), 1)
    return _BLOCKS[min(max(eighths - 8 * (rows - 1 - row), 0), 8)]


def _engines(picture: Picture, width: int) -> list[Text]:
    lines = []
    for number in range(len(picture.split.engines)):
        text = Text()
        mark = ">" if number == picture.chosen and picture.keys else " "
        text.append(f"{mark}{number + 1}".ljust(_LABEL), "bold" if mark == ">" else "dim")
        for side in picture.sides:
            engine = side.engines[number]
            cell = Text(f"{engine.name:10} ").append(f"{engine.state:9}", _STATES[engine.state])
            cell.append(f"{_count(engine.running)} run, {_count(engine.waiting)} wait")
            text.append_text(_fitted(cell, _half(width)))
        lines.append(text)
    return lines


def _engines_in_short(picture: Picture, width: int) -> Text:
    text = Text().append("running+wait".ljust(_LABEL), "dim")
    for side in picture.sides:
        cell = Text()
        for number, engine in enumerate(side.engines):
            word = f"{number + 1}:" + (
                f"{_count(engine.running)}+{_count(engine.waiting)}"
                if engine.state in ("up", "slow")
                else engine.state
            )
            style = _STATES[engine.state]
            chosen = number == picture.chosen and picture.keys
            cell.append(word, f"{style} underline" if chosen else style).append(" ")
        text.append_text(_fitted(cell, _half(width)))
    return text


def _fitted(cell: Text, width: int) -> Text:
    cell.truncate(width - 1, pad=True)
    return cell.append(" ")


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _answered(picture: Picture, width: int) -> Text:
    text = Text().append("requests".ljust(_LABEL), "dim")
    for side in picture.sides:
        cell = Text(f"{side.answered:,} answered, ")
        cell.append(f"{side.failed:,} failed", "bold red" if side.failed else "green")
        text.append_text(_fitted(cell, _half(width)))
    return text


def _keys(picture: Picture, width: int) -> list[Text]:
    if not picture.keys:
        return [Text("Ctrl-C ends it.", "dim")]
    count = len(picture.split.engines)
    return [Text(one, "dim") for one in textwrap.wrap(KEYS.format(count=count), width)]


def _wrapped(text: str, width: int, most: int, style: str) -> list[Text]:
    found = textwrap.wrap(text, width, max_lines=most, placeholder=" ...") if width > 8 else []
    return [Text(one, style) for one in found]
