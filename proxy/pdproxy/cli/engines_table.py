"""The table of `pdproxy engines list`: once, or live. Owns what of an engine has a column."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdproxy.cli.admin_client import AdminFailed, printable
from pdproxy.observe.prompt_shares import PoolPrompts

_COLOURS = {
    "serving": "green",
    "warming": "cyan",
    "joining": "cyan",
    "probing": "yellow",
    "draining": "yellow",
    "drained": "magenta",
}
WIDTH = 160
"""Columns where standard output is no terminal."""
COLUMNS = (
    "id",
    "role",
    "engine",
    "state",
    "health",
    "requests",
    "pairs",
    "pool",
    "source",
    "what is wrong",
)


def rows(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each engine: pool by pool, prefill engines first."""
    order = ("encode", "prefill", "decode", "any", "aggregated")
    pools = [*dict.fromkeys(one["pool"] for one in entries)]
    found = sorted(
        entries,
        key=lambda one: (
            pools.index(one["pool"]),
            order.index(one["role"]) if one["role"] in order else len(order),
        ),
    )
    return [_row(entry) for entry in found]


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    pairs, drain, wrong = entry["pairs"], entry["drain"], []
    if drain is not None and entry["state"] == "draining":
        wrong.append(
            f"drained by {drain['by']}, waits for {drain['waits_for']}, {drain['left_s']:.0f} s "
            f"left"
        )
    elif drain is not None:
        wrong.append(f"drained by {drain['by']}")
    elif entry["health"]["reason"]:
        wrong.append(entry["health"]["reason"])
    if entry["breaker"]["open_for_s"]:
        wrong.append(f"excluded for {entry['breaker']['open_for_s']:.0f} s")
    shown = "-"
    if pairs is not None and entry["role"] not in ("aggregated", "encode"):
        shown = f"{pairs['paired']} of {pairs['paired'] + pairs['not_paired_count']}"
        wrong += [f"not paired with {one['url']}: {one['why']}" for one in pairs["not_paired"][:1]]
    cells = (
        entry["id"],
        entry["role"],
        entry["url"],
        entry["state"],
        entry["health"]["state"],
        str(entry["load"]["requests"]),
        shown,
        entry["pool"],
        entry["source"],
        "; ".join(wrong),
    )
    return tuple(printable(cell) for cell in cells)


def prompts(listed: Mapping[str, Any]) -> str:
    """Return how the prompts of each pool were served, a line each."""
    pools = msgspec.convert(listed.get("prompts", []), list[PoolPrompts])
    lines = [
        one.served.spelled() if len(pools) == 1 else f"pool {one.pool}: {one.served.spelled()}"
        for one in pools
    ]
    return "\n".join(map(printable, lines))


def table(listed: Mapping[str, Any], title: str | None = None) -> Table:
    """Return the table of the engines that the admin API has listed."""
    made = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        caption=Text(prompts(listed)),
        caption_justify="left",
        pad_edge=False,
    )
    for name in COLUMNS:
        made.add_column(
            name,
            justify="right" if name in ("requests", "pairs") else "left",
            no_wrap=name not in ("what is wrong", "source", "pool"),
            overflow="fold",
        )
    for row in rows(listed["engines"]):
        made.add_row(
            *(
                Text(cell, _COLOURS.get(cell, "") if name == "state" else "")
                for name, cell in zip(COLUMNS, row, strict=True)
            )
        )
    return made


def show(listed: Mapping[str, Any]) -> None:
    """Print the table once."""
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table(listed))


def watch(ask: Callable[[], Mapping[str, Any]], interval: float, rounds: int | None = None) -> None:
    """Show the table live until Ctrl-C. While the proxy does not answer, the title says so.
    `rounds`: so often, None for ever.
    """
    listed: Mapping[str, Any] = {"engines": []}
    console = Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while rounds is None or rounds > 0:
            title = time.strftime("%H:%M:%S")
            try:
                listed = ask()
                title += f": {len(listed['engines'])} engines"
            except AdminFailed as error:
                title += f": {error}"
            live.update(table(listed, title), refresh=True)
            rounds = None if rounds is None else rounds - 1
            if rounds != 0:
                time.sleep(interval)
