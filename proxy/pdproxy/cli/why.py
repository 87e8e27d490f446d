"""`pdproxy why`: which engines a request of a running proxy was given to and for what reason, each
attempt, and what ended it, by its admin API.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pdproxy.cli.admin_client import AdminClient, add_admin_options, printable, run_with_client
from pdproxy.cli.parser import examples
from pdproxy.cli.request_texts import duration, ending, failure, heading, missing, requests_of
from pdproxy.observe.events import ALONE
from pdproxy.observe.recent import RecentFailure, RecentPrompt, RecentRequest
from pdproxy.observe.requests import OUTCOMES, REASONS
from pdproxy.scheduling.decisions import KEPT

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands

_ALONE = dict(ALONE)
_MEANINGS = {**dict(OUTCOMES), **{reason.value: text for reason, _, text in REASONS}}


Numbers = dict[str, float | None]


class Other(msgspec.Struct):
    """The next best choice."""

    choice: str
    engines: list[str]
    values: Numbers
    parts: Numbers


class Decided(msgspec.Struct):
    """A decision of a placement, as the admin API shows it."""

    age_s: float
    request_id: str
    choice: str
    reason: str
    engines: list[str]
    must_be_whole: str | None
    tokens: int | None
    values: Numbers | None
    parts: Numbers | None
    term: str | None
    other: Other | None
    outcome: dict[str, Any] | None


class Decisions(msgspec.Struct):
    """The last decisions, the newest first. `placement`: None if no pool has one."""

    placement: str | None
    decisions: list[Decided]


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "why",
        help=summary,
        description="Show of one request which engines it was given to, the reason of the "
        "placement with its numbers, each leg that failed, and what ended it. It asks the admin "
        "API (listen.admin). The exit code is 0 if it was shown, 1 with a line if the proxy does "
        "not know the request or does not answer, 2 if arguments or settings are wrong.",
        usage="pdproxy why ID [--json] [option ...]",
        epilog=examples("pdproxy why 3f0c8d1e5a --admin unix:/run/pdproxy/admin.sock"),
    )
    parser.add_argument("id", metavar="ID", help="the request's X-Request-Id")
    parser.add_argument("--json", action="store_true", help="print requests and decisions as JSON")
    add_admin_options(parser)
    parser.set_defaults(run=lambda arguments: run_with_client(show, arguments))


def show(client: AdminClient, arguments: argparse.Namespace) -> Any:
    """Print it. Return what is to be printed as JSON instead."""
    found = requests_of(client, arguments.id)
    decisions = msgspec.convert(client.ask("GET", "/decisions"), Decisions)
    made = [one for one in decisions.decisions if one.request_id == found.requests[0].id]
    if arguments.json:
        return {
            **msgspec.to_builtins(found),
            "placement": decisions.placement,
            "decisions": msgspec.to_builtins(made),
        }
    request, count = found.requests[0], len(found.requests)
    for line in course(request, made, decisions.placement):
        print(printable(line))
    if count > 1:
        print(f"{count} requests had this id: the newest one is shown, and the decisions of all.")
    if found.silent_workers:
        print(missing(found.silent_workers).removeprefix("; "))
    return None


def course(
    request: RecentRequest, decisions: Sequence[Decided], placement: str | None
) -> Iterator[str]:
    """Yield the lines: what the request is, what happened to it in its order, and its end.

    `decisions`: those for this request; `placement`: what makes decisions, None where nothing does.
    """
    yield from heading(request)
    yield ""
    unit, failures = "attempt" if request.prompt_count <= 1 else "decision", [*request.failures]
    for number, one in enumerate(reversed(decisions)):
        yield f"{unit} {number + 1}: {_decision(one)}"
        yield from _next_best(one)
        yield from _failed(failures, one.engines)
    yield from _failed(failures, None)
    for prompt in request.prompts:
        if not decisions:
            yield _last_attempt(prompt)
        if prompt.why_alone is not None:
            meaning = _ALONE.get(prompt.why_alone)
            yield f"one engine: {prompt.why_alone}{'' if meaning is None else f' ({meaning})'}"
    if len(request.prompts) < request.prompt_count:
        yield f"and {request.prompt_count - len(request.prompts)} more prompts"
    if request.prompts and not decisions:
        yield (
            "its pool has no placement: the policy chose"
            if placement is None
            else f"the placement's numbers are not known: it did not decide, or its decision is "
            f"none of the last {KEPT}"
        )
    yield ending(request)
    for word in (request.outcome, request.reason):
        if word in _MEANINGS:
            yield f"  {word}: {_MEANINGS[word]}"


def _failed(failures: list[RecentFailure], engines: Sequence[str] | None) -> Iterator[str]:
    """Take failed legs of one attempt, up to the one that ended it, and yield a line for each.
    `engines`: those of the attempt, None for all failures that are left.
    """
    while failures and (engines is None or failures[0].engine in engines):
        one = failures.pop(0)
        yield f"  at {duration(one.at_s)}: {failure(one)}"
        if one.retried and engines is not None:
            return


def _decision(one: Decided) -> str:
    engines = f" {' -> '.join(one.engines)}" if one.engines else ""
    numbers = [] if one.tokens is None else [f"prompt tokens {one.tokens}"]
    if one.values:
        numbers.append(_numbers(one.values))
    bound = f", since it must be whole: {one.must_be_whole}" if one.must_be_whole else ""
    figures = f": {', '.join(numbers)}" if numbers else ""
    return f"{one.choice}{engines}, reason {one.reason}{bound}{figures}"


def _next_best(one: Decided) -> Iterator[str]:
    other, values = one.other, one.values
    if other is None or values is None or one.parts is None or one.term is None:
        return
    cached = one.term == "cached"
    ours, theirs = (values, other.values) if cached else (one.parts, other.parts)
    what = "prompt tokens in the cache" if cached else "its part of the cost"
    yield (
        f"  next best: {other.choice} {' -> '.join(other.engines)}: {_numbers(other.values)}; "
        f"{one.term} made the difference ({what}: {_number(ours[one.term])} here, "
        f"{_number(theirs[one.term])} there)"
    )


def _numbers(values: Numbers) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4g}"


def _last_attempt(prompt: RecentPrompt) -> str:
    engines = [one for one in (prompt.prefill, prompt.decode) if one is not None]
    how = "split" if len(engines) == 2 else "one engine"
    reason = "" if prompt.decision is None else f", reason {prompt.decision}"
    what = f"attempt {prompt.attempts}" if prompt.attempts else "engines"
    return f"{what}: {how} {' -> '.join(engines) or '-'}{reason}"
