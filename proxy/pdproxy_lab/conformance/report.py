"""The report as text or as JSON. Owns the verdict on the run and its exit codes. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import msgspec

from pdproxy.check.report import WIDTH, Mark, TextStyle
from pdproxy_lab.conformance.results import VERDICTS, PairResults, Report, Result, Verdict

FAILED = 1
UNJUDGED = 3
_MARKS: dict[Verdict, Mark] = {
    "passed": "good",
    "failed": "bad",
    "not_applicable": "note",
    "not_judged": "warning",
}
_VERDICT_TEXTS: dict[Verdict, str] = {
    "passed": "passed",
    "failed": "failed",
    "not_applicable": "not applicable",
    "not_judged": "could not be judged",
}


def exit_code(*reports: Report) -> int:
    """Return 0 if everything that applies has passed, 1 if something failed, 3 if something could
    only not be judged.
    """
    failed, unjudged = (
        any(one.count(kind) for one in reports) for kind in ("failed", "not_judged")
    )
    return FAILED if failed else UNJUDGED if unjudged else 0


def verdict(report: Report) -> str:
    """Return the verdict in one line."""
    counted = ", ".join(
        f"{count} {_VERDICT_TEXTS[kind]}" for kind in VERDICTS if (count := report.count(kind))
    )
    word = {0: "CONFORMS", FAILED: "DOES NOT CONFORM", UNJUDGED: "NOT PROVEN"}[exit_code(report)]
    return f"{word} to {report.connector}: {counted}"


def as_text(report: Report, style: TextStyle) -> str:
    """Return the report as text, with a line break at its end."""
    lines = [line for pair in report.pairs for line in _pair(pair, style)]
    return "\n".join([*lines, verdict(report)]) + "\n"


def as_json(report: Report) -> bytes:
    """Return the report as one JSON object."""
    body = {
        "exit_code": exit_code(report),
        "verdict": verdict(report),
        "connector": report.connector,
        "counts": {kind: report.count(kind) for kind in VERDICTS},
        "pairs": report.pairs,
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2)


def pools_as_text(reports: Mapping[str, Report], style: TextStyle) -> str:
    """Return the reports on several pools by their names."""
    return "\n".join(f"pool {name}\n{as_text(report, style)}" for name, report in reports.items())


def pools_as_json(reports: Mapping[str, Report]) -> bytes:
    """Return the reports on several pools as one JSON object."""
    pools = [
        {"name": name, "report": msgspec.Raw(as_json(report))} for name, report in reports.items()
    ]
    return msgspec.json.format(
        msgspec.json.encode({"exit_code": exit_code(*reports.values()), "pools": pools}), indent=2
    )


def _pair(pair: PairResults, style: TextStyle) -> Iterator[str]:
    yield f"prefill {pair.prefill}, decode {pair.decode}"
    for result in pair.results:
        yield from _result(result, style)
    yield ""


def _result(result: Result, style: TextStyle) -> Iterator[str]:
    mark = style.mark(_MARKS[result.verdict])
    yield from _wrapped(f"{result.name}: {result.does}", f"  {mark} ", 4, "    ")
    yield from _wrapped(f"{_VERDICT_TEXTS[result.verdict]}: {result.says}", "      ", 6, "      ")


def _wrapped(text: str, first: str, width: int, others: str) -> Iterator[str]:
    """Wrap a text; `first` may contain colours, so its width is an argument."""
    for number, line in enumerate(
        textwrap.wrap(text, WIDTH - width, break_long_words=False, break_on_hyphens=False)
    ):
        yield (others if number else first) + line
