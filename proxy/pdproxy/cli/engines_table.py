"""What `pdproxy engines list` prints: what is wrong, and the table of the engines; once, or live.
Owns what of an engine has a column.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pdproxy.cli.admin_client import AdminFailed, printable
from pdproxy.cli.engine_figures import EngineFigures, figures
from pdproxy.cli.engine_names import short_names
from pdproxy.cli.request_texts import duration, missing
from pdproxy.observe.prompt_shares import PoolPrompts
from pdproxy.observe.recent import RecentRequest

_COLOURS = {
    "serving": "green",
    "warming": "cyan",
    "joining": "cyan",
    "drained": "magenta",
}
WIDTH = 160
"""Columns where standard output is no terminal, and COLUMNS is not set."""
COLUMNS = ("engine", "role", "state", "requests", "latency", "tokens/s", "KV", "failed")
MORE = ("pairs", "pod", "source", "id")
"""Columns of a wide terminal: those in which something stands."""
_NUMBERS = frozenset({"requests", "latency", "tokens/s", "KV", "failed", "pairs"})
_GAP = 2
_NARROWEST = 18
"""Characters of the column of URLs, where the others leave fewer."""


def in_order(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the engines pool by pool, prefill engines first."""
    order = ("encode", "prefill", "decode", "any", "aggregated")
    pools = [*dict.fromkeys(one["pool"] for one in entries)]
    return sorted(
        entries,
        key=lambda one: (
            pools.index(one["pool"]),
            order.index(one["role"]) if one["role"] in order else len(order),
        ),
    )


def wrong(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong, a text for each engine that has something. Two engines that are not
    paired are told once.
    """
    told: set[frozenset[str]] = set()
    down = {one["url"] for one in entries if one["health"]["state"] == "down"}
    found = {}
    for entry in sorted(entries, key=_misfit, reverse=True):
        texts = [*_own_faults(entry), *_not_paired(entry, down, told)]
        if texts:
            pod = entry["labels"].get("pod")
            named = f"{entry['url']} ({entry['role']}{f', pod {pod}' if pod else ''})"
            found[entry["url"]] = printable(f"{named}: {'; '.join(texts)}")
    return [found[one["url"]] for one in entries if one["url"] in found]


def _misfit(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Return what is larger, the likelier an engine is the cause if it is not paired."""
    pairs = entry["pairs"]
    return (0, 0) if pairs is None else (pairs["not_paired_count"], -pairs["paired"])


def _own_faults(entry: Mapping[str, Any]) -> Iterator[str]:
    drain, reason = entry["drain"], entry["health"]["reason"]
    if drain is not None and entry["state"] == "draining":
        yield (
            f"drained by {drain['by']}, waits for {drain['waits_for']}, {drain['left_s']:.0f} s "
            f"left"
        )
    elif drain is not None:
        yield f"drained by {drain['by']}"
    elif reason:
        yield f"{entry['health']['state']}: {reason}"
    if entry["breaker"]["open_for_s"]:
        yield f"excluded for {entry['breaker']['open_for_s']:.0f} s"
    if entry["waits"]:
        yield entry["waits"]
    yield from entry["slow"]


def _not_paired(
    entry: Mapping[str, Any], down: set[str], told: set[frozenset[str]]
) -> Iterator[str]:
    """Yield with whom an engine is not paired, and why. Whoever is down is paired with nobody."""
    if entry["pairs"] is None or entry["url"] in down:
        return
    by_reason: dict[str, list[str]] = {}
    for other in entry["pairs"]["not_paired"]:
        pair = frozenset({entry["url"], other["url"]})
        if pair not in told and other["url"] not in down:
            told.add(pair)
            by_reason.setdefault(other["why"], []).append(other["url"])
    for why, urls in by_reason.items():
        yield f"not paired with {', '.join(urls)}: {why}"


def rows(
    entries: Sequence[Mapping[str, Any]],
    of: Mapping[str, EngineFigures],
    seconds: float,
) -> list[dict[str, str]]:
    """Return a row for each engine: cells by the names of their columns.

    `of`: the engines' figures by URL, `seconds`: the time that these cover.
    """
    return [_row(entry, of.get(entry["url"], EngineFigures()), seconds) for entry in entries]


def _row(entry: Mapping[str, Any], of: EngineFigures, seconds: float) -> dict[str, str]:
    pairs, usage, state = entry["pairs"], entry["load"]["kv_usage"], entry["state"]
    if state in ("serving", "warming") and entry["health"]["state"] != "up":
        state = entry["health"]["state"]
    paired = "-"
    if pairs is not None and entry["role"] not in ("aggregated", "encode"):
        paired = f"{pairs['paired']} of {pairs['paired'] + pairs['not_paired_count']}"
    cells = {
        "engine": entry["url"],
        "role": entry["role"],
        "state": state,
        "requests": str(entry["load"]["requests"]),
        "latency": "-" if of.latency is None else duration(of.latency),
        "tokens/s": f"{of.tokens / max(seconds, 1.0):.0f}",
        "KV": "-" if usage is None else f"{usage:.0%}",
        "failed": str(of.failures),
        "pairs": paired,
        "pod": entry["labels"].get("pod", ""),
        "source": entry["source"],
        "id": entry["id"],
    }
    return {name: printable(cell) for name, cell in cells.items()}


def prompts(listed: Mapping[str, Any]) -> str:
    """Return how the prompts of each pool were served, a line each."""
    pools = msgspec.convert(listed.get("prompts", []), list[PoolPrompts])
    lines = [
        one.served.spelled() if len(pools) == 1 else f"pool {one.pool}: {one.served.spelled()}"
        for one in pools
    ]
    return "\n".join(map(printable, lines))


def shown(
    listed: Mapping[str, Any], recent: Mapping[str, Any], width: int, title: str | None = None
) -> RenderableType:
    """Return what is printed of the engines and of the requests that the admin API has listed.

    `width`: the terminal's, in characters.
    """
    seconds, of = figures(msgspec.convert(recent["requests"], list[RecentRequest]))
    entries = in_order(listed["engines"])
    parts: list[RenderableType] = [] if title is None else [Text(title)]
    parts += [_hanging(text) for text in wrong(entries)]
    parts += [_hanging(printable(text)) for text in listed.get("scaling", [])]
    pools = [(name, list(found)) for name, found in groupby(entries, lambda one: one["pool"])]
    for name, found in pools:
        heading = f"pool {printable(name)}" if len(pools) > 1 else None
        parts.append(_table(rows(found, of, seconds), width, heading))
    note = (
        f"latency (median), tokens/s, failed (legs): of the last {seconds:.0f} s; latency: of a "
        f"prefill engine to its answer, of others to a stream's first data"
    )
    note += missing(recent["silent_workers"])
    return Group(*parts, Text(), *(Text(text) for text in (note, prompts(listed)) if text))


def _hanging(text: str) -> RenderableType:
    """Return a text that wraps with its second line to the right of its first one."""
    made = Table.grid()
    made.add_column(width=2)
    made.add_column(overflow="fold")
    made.add_row(Text("!", "bold red"), Text(text))
    return made


def _table(cells: Sequence[Mapping[str, str]], width: int, heading: str | None) -> RenderableType:
    columns = [*COLUMNS, *(name for name in MORE if any(row[name] for row in cells))]
    rest = _rest(cells, columns, width)
    if rest < max(map(len, (row["engine"] for row in cells))):
        columns = [*COLUMNS]
        rest = max(_NARROWEST, _rest(cells, columns, width))
    made = Table(
        box=box.SIMPLE_HEAD,
        title=heading,
        title_justify="left",
        padding=(0, _GAP - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in _NUMBERS else "left",
            max_width=rest if name == "engine" else None,
            no_wrap=name != "engine",
            overflow="fold",
        )
    names = short_names([row["engine"] for row in cells], rest)
    for row, engine in zip(cells, names, strict=True):
        made.add_row(
            engine,
            *(
                Text(row[name], _COLOURS.get(row[name], "yellow") if name == "state" else "")
                for name in columns[1:]
            ),
        )
    return Padding(made, (1, 0, 0, 0))


def _rest(cells: Sequence[Mapping[str, str]], columns: Sequence[str], width: int) -> int:
    """Return how many characters the other columns leave for the URLs."""
    taken = (max(len(name), *(len(row[name]) for row in cells)) + _GAP for name in columns[1:])
    return width - sum(taken)


def show(listed: Mapping[str, Any], recent: Mapping[str, Any]) -> None:
    """Print the engines once."""
    console = console_of()
    console.print(shown(listed, recent, console.width), highlight=False)


def console_of() -> Console:
    """Return the console of standard output."""
    console = Console()
    fixed = not console.is_terminal and "COLUMNS" not in os.environ
    return Console(width=WIDTH) if fixed else console


def watch(
    ask: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
    interval: float,
    rounds: int | None = None,
) -> None:
    """Show the engines live until Ctrl-C. While the proxy does not answer, the title says so.
    `ask` returns the engines and the requests; `rounds`: so often, None for ever.
    """
    listed: Mapping[str, Any] = {"engines": []}
    recent: Mapping[str, Any] = {"requests": [], "silent_workers": []}
    console = Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while rounds is None or rounds > 0:
            title = time.strftime("%H:%M:%S")
            try:
                listed, recent = ask()
                title += f": {len(listed['engines'])} engines"
            except AdminFailed as error:
                title += f": {error}"
            live.update(shown(listed, recent, console.width, title), refresh=True)
            rounds = None if rounds is None else rounds - 1
            if rounds != 0:
                time.sleep(interval)
