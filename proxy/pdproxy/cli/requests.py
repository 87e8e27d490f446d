"""`pdproxy requests`: the requests of a running proxy, and where the time of one went, by its admin
API.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as escaped

import msgspec

from pdproxy.cli.admin_client import AdminClient, add_admin_options, printable, run_with_client
from pdproxy.cli.parser import examples
from pdproxy.cli.phases import Phase, phases
from pdproxy.cli.request_texts import (
    Listed,
    duration,
    ending,
    failure,
    heading,
    missing,
    requests_of,
)
from pdproxy.observe.recent import KEPT, RecentPrompt, RecentRequest
from pdproxy.settings.errors import SettingsError

if TYPE_CHECKING:
    from rich.table import Table

    from pdproxy.cli.parser import Commands

SHOWN = 20
_BAR = 24


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "requests",
        help=summary,
        description="Show the requests that run, the longest-running first, and the last ones that "
        "have ended, the newest first, each with its longest phase; or of one request all phases, "
        "and what failed. It asks the admin API (listen.admin). The exit code is 0 if it was "
        "shown, 1 with a line if the proxy does not know the request or does not answer, 2 if "
        "arguments or settings are wrong.",
        usage="pdproxy requests [ID] [--outcome OUTCOME] [--limit N] [--json] [option ...]",
        epilog=examples(
            "pdproxy requests",
            "pdproxy requests --outcome running",
            "pdproxy requests 3f0c8d1e5a --admin unix:/run/pdproxy/admin.sock",
        ),
    )
    parser.add_argument(
        "id",
        metavar="ID",
        nargs="?",
        help="one request's X-Request-Id: show its phases (default: list requests)",
    )
    parser.add_argument(
        "--outcome",
        metavar="OUTCOME",
        help="only requests that have ended so, as in the access line; running: those that run "
        "(default: all)",
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=_count,
        default=SHOWN,
        help=f"so many at most, up to {KEPT} (default: {SHOWN})",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_admin_options(parser)
    parser.set_defaults(run=lambda arguments: run_with_client(show, arguments))


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= KEPT:
        raise argparse.ArgumentTypeError(f"expected 1 to {KEPT}, got {text!r}")
    return int(text)


def show(client: AdminClient, arguments: argparse.Namespace) -> Any:
    """Print the list, or one request. Return what is to be printed as JSON instead."""
    if arguments.id is not None:
        if arguments.outcome is not None:
            raise SettingsError("--outcome: has no effect with an ID")
        found = requests_of(client, arguments.id)
        if arguments.json:
            return msgspec.to_builtins(found)
        for request in found.requests:
            print("\n".join(map(printable, waterfall(request))), end="\n\n")
        return None
    path = f"/requests?limit={arguments.limit}"
    if arguments.outcome is not None:
        path += f"&outcome={escaped(arguments.outcome, safe='')}"
    answer = client.ask("GET", path)
    if arguments.json:
        return answer
    # Imported here: the library of the table takes a while to load.
    from pdproxy.cli.engines_table import console_of

    listed = msgspec.convert(answer, Listed)
    console = console_of()
    console.print(_table(listed.requests), highlight=False)
    if listed.silent_workers:
        print(missing(listed.silent_workers).removeprefix("; "))
    return None


def waterfall(request: RecentRequest) -> Iterator[str]:
    """Yield the lines that show where the time of a request went."""
    yield from heading(request)
    for number, prompt in enumerate(request.prompts or [None]):
        yield ""
        if request.prompt_count > 1:
            yield f"prompt {number + 1} of {request.prompt_count}:"
        if prompt is not None:
            yield from _facts(prompt)
        yield from _bars(phases(request, prompt), request.total_s)
    if request.failures:
        yield ""
    for one in request.failures:
        yield f"at {duration(one.at_s)}: {failure(one)}"
    if request.error is not None:
        yield ending(request)


def _facts(prompt: RecentPrompt) -> Iterator[str]:
    if prompt.attempts > 1:
        yield f"{prompt.attempts} attempts; the phases are those of the last one"
    if prompt.continued:
        pause = duration(prompt.pause_s or 0.0)
        yield f"another engine went on with the stream {prompt.continued} times, pause {pause}"
    if prompt.why_alone is not None:
        yield f"one engine served it: {prompt.why_alone}"


def _bars(shown: Sequence[Phase], total: float) -> Iterator[str]:
    scale = _BAR / total if total > 0 else 0.0
    for one in shown:
        begin = min(_BAR - 1, int(one.begin * scale))
        bar = "#" * max(1, min(_BAR - begin, round(one.seconds * scale)))
        end = " ..." if one.goes_on else ""
        where = "" if one.engine is None else f"  {one.engine}"
        yield (
            f"{one.name:<12} {duration(one.seconds) + end:>11}  {' ' * begin + bar:<{_BAR}}{where}"
        ).rstrip()


def _table(requests: Sequence[RecentRequest]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    made.add_column("id", overflow="fold")
    for name in ("ended", "outcome", "total", "longest phase"):
        made.add_column(name, justify="left" if name == "outcome" else "right", no_wrap=True)
    for one in requests:
        ended = "-" if one.ended_s is None else duration(one.ended_s)
        cells = (one.id, ended, one.outcome, duration(one.total_s), _longest(one))
        made.add_row(*(Text(printable(cell)) for cell in cells))
    return made


def _longest(request: RecentRequest) -> str:
    prompts: Sequence[RecentPrompt | None] = request.prompts or [None]
    found = [one for prompt in prompts for one in phases(request, prompt)]
    longest = max(found, key=lambda one: one.seconds)
    return f"{longest.name} {duration(longest.seconds)}"
