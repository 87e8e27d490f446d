"""Renders the figures: a few tables for a terminal, one line otherwise. Pure.

Owns layout and units. 80 columns are enough for everything; with few rows, engines are left out
before totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdproxy.observe.prompt_shares import PromptShare
from pdproxy_lab.demo.figures import WINDOW, EngineFigures, Figures, Latency

WIDE = 100
"""From this many columns on, an engine's address and a longer bar are shown."""
_TOTALS = 7
"""Rows below the engines: an empty one and six with figures."""
_HEAD = 2
_UNKNOWN = "-"


def render(figures: Figures, title: str, *, width: int, height: int) -> RenderableType:
    """Return the view for a terminal of so many columns and rows."""
    rows = height - _HEAD - _TOTALS - 1  # the last row stays free: writing there would scroll
    shown = figures.engines if len(figures.engines) <= rows else figures.engines[: max(0, rows - 1)]
    parts: list[RenderableType] = [_head(figures, title)]
    if shown:
        parts.append(_engines(shown, wide=width >= WIDE))
    if left := figures.engines[len(shown) :]:
        up = sum(engine.up is True for engine in left)
        parts.append(
            Text(f"and {len(left)} more, {up} up" if shown else f"{len(left)} engines, {up} up")
        )
    return Group(*parts, Text(), _totals(figures))


def line(figures: Figures) -> str:
    """Return the figures as one line of plain text."""
    up = sum(engine.up is True for engine in figures.engines)
    failed = sum(count for outcome, count in figures.outcomes.items() if outcome != "ok")
    moved = figures.transfers
    parts = [
        f"{figures.elapsed:.0f} s",
        f"engines {up}/{len(figures.engines)} up"
        if figures.answers
        else "the proxy's metrics don't answer",
        f"in flight {figures.inflight}",
        f"ok {figures.outcomes.get('ok', 0)}",
        f"failed {failed}",
        (
            f"tokens/s in {number(figures.prompt_tokens_per_s)} out "
            f"{number(figures.output_tokens_per_s)}"
        ),
        f"TTFT p50/p99 {_pair(figures.ttft)}",
        f"ITL p50/p99 {_pair(figures.itl)}",
        f"KV {moved.count} moved {size(moved.size)}",
    ]
    if whole := figures.prompts.whole:
        parts.append(f"alone {_part(sum(whole.values()), figures.prompts)}")
    if figures.prompts.idle:
        parts.append(f"beside idle P {_part(figures.prompts.idle, figures.prompts)}")
    if figures.traffic is not None and figures.traffic.failed:
        parts.append(f"traffic failed {figures.traffic.failed}")
    return "  ".join(parts)


def number(value: float | None) -> str:
    """Format a number, or a number per second."""
    if value is None:
        return _UNKNOWN
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def size(value: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"


def milliseconds(value: float | None) -> str:
    """Format seconds as milliseconds."""
    if value is None:
        return _UNKNOWN
    return f"{1000 * value:.1f}" if value < 0.01 else f"{1000 * value:.0f}"


def _head(figures: Figures, title: str) -> Text:
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append("pdproxy demo", "bold").append(f"  {title}  {figures.elapsed:.0f} s")
    if not figures.answers:
        head.append("  its metrics don't answer", "bold red")
    return head


def _engines(engines: Sequence[EngineFigures], *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("engine", no_wrap=True)
    if wide:
        table.add_column("at", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("running", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV blocks in use", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    for engine in engines:
        place = [engine.place.url.removeprefix("http://")] if wide else []
        table.add_row(
            f"{engine.place.role} {engine.place.name}",
            *place,
            _state(engine),
            number(engine.running),
            number(engine.waiting),
            _bar(engine.kv_usage, 20 if wide else 10),
            Text(number(engine.tokens_per_s)).append(
                " in " if engine.place.role == "prefill" else " out", "dim"
            ),
        )
    return table


def _state(engine: EngineFigures) -> Text:
    match engine.up:
        case True if engine.running is not None:
            return Text("up", "green")
        case True:
            return Text("up, no metrics", "yellow")
        case False:
            return Text("down", "bold red")
        case None:
            return Text(_UNKNOWN)


def _bar(usage: float | None, cells: int) -> Text:
    if usage is None:
        return Text(_UNKNOWN)
    full = min(cells, round(usage * cells + 0.499)) if usage > 0 else 0
    style = "red" if usage > 0.9 else "cyan"
    return (
        Text("━" * full, style).append("─" * (cells - full), "dim").append(f" {100 * usage:5.1f}%")
    )


def _totals(figures: Figures) -> Table:
    moved, traffic = figures.transfers, figures.traffic
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row("requests", _requests(figures))
    table.add_row("TTFT", _spread(figures.ttft).append(f"  over the last {WINDOW:.0f} s", "dim"))
    table.add_row("ITL", _spread(figures.itl))
    table.add_row("tokens/s", _tokens(figures))
    kv = Text(f"{moved.count:,} transfers, {size(moved.size)}")
    if moved.bytes_per_s is not None:
        kv.append(f", {size(moved.bytes_per_s)}/s")
    _trouble(
        kv,
        (
            ("failed", moved.failed),
            ("expired", moved.expired),
            ("tokens recomputed", moved.recomputed),
        ),
    )
    table.add_row("KV moved", kv)
    if traffic is None:
        table.add_row("traffic", Text("yours alone", "dim"))
    else:
        sent = Text(f"{traffic.sent:,} of the demo's own sent, {traffic.whole:,} answered whole")
        _trouble(
            sent, ((f"failed {reason}", count) for reason, count in traffic.failures.most_common(2))
        )
        table.add_row("traffic", sent)
    return table


def _requests(figures: Figures) -> Text:
    text = Text(f"{figures.inflight} in flight, ")
    if figures.queued:
        text.append(f"{figures.queued} queued, ", "yellow")
    text.append(f"{figures.outcomes.get('ok', 0):,} ok", "green")
    _trouble(
        text, ((name, count) for name, count in sorted(figures.outcomes.items()) if name != "ok")
    )
    return text.append(
        f", {number(figures.requests_per_s)}/s" if figures.requests_per_s is not None else ""
    )


def _tokens(figures: Figures) -> Text:
    text = Text(
        f"{number(figures.prompt_tokens_per_s)} in, {number(figures.output_tokens_per_s)} out"
    )
    prompts = figures.prompts
    if whole := prompts.whole:
        text.append(f", {_part(sum(whole.values()), prompts)} of prompts alone", "yellow")
        if prompts.idle:
            text.append(f", {_part(prompts.idle, prompts)} beside idle P", "red")
        text.append(f": {prompts.reasons(whole)}", "dim")
    return text


def _part(tokens: int, prompts: PromptShare) -> str:
    return f"{tokens / prompts.tokens:.0%}"


def _trouble(text: Text, found: Iterable[tuple[str, int]]) -> None:
    """Add what is not zero, in red."""
    for name, count in found:
        if count:
            text.append(f", {count:,} {name}", "red")


def _spread(latency: Latency) -> Text:
    return Text(f"p50 {milliseconds(latency.p50)} ms  p99 {milliseconds(latency.p99)} ms")


def _pair(latency: Latency) -> str:
    return f"{milliseconds(latency.p50)}/{milliseconds(latency.p99)} ms"
