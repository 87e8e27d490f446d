"""docs/guide/monitoring.md and alerts.md name only metrics, labels, values and log fields that
exist, and the former all log fields and phases.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdproxy.observe.description import MetricKind
from pdproxy.observe.events import Gaps, LegTimes, Refused, RequestEnded
from pdproxy.observe.formats import JsonFormatter
from pdproxy.observe.logs import access_fields
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.requests import PHASES
from tests.reference.metrics import METRICS

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PAGE, ALERTS = (GUIDE / "monitoring.md").read_text(), (GUIDE / "alerts.md").read_text()
NAME = re.compile(r"\b(?:pdproxy|process|python)_[a-z_]+")
MATCHER = re.compile(r'(pdproxy_[a-z_]+)\{(\w+)=~?"([^"]+)"\}')
CODE = re.compile(r"`([^`\n]+)`")
FULL = RequestEnded(
    request_id="r", endpoint="/v1/completions", model="m", outcome="engine", status=502,
    legs=[
        LegTimes("p", "d", "n", 0.1, 0.2, 0.3, attempts=1, encode_s=0.1, encoders=(("e", 0.1),)),
        LegTimes(None, "d", "n", None, 0.2, 0.3, attempts=1),
    ],
    queue_s=0.0, first_s=0.2, total_s=20.0, prompt_tokens=61, completion_tokens=5, gaps=Gaps(),
    error="broken",
    stream=True, client="192.0.2.1", key="file:7", reason="answers",
)  # fmt: skip
ALONE = RequestEnded(
    request_id="a", endpoint="/v1/completions", model="m", outcome="ok", status=200,
    legs=[LegTimes(None, "d", whole_s=1.0)],
    queue_s=0.0, first_s=None, total_s=1.0, prompt_tokens=9, completion_tokens=1, gaps=Gaps(),
    key="file:7",
)  # fmt: skip


def code(page: str) -> list[str]:
    """All that is code on the page: a table's cells escape their bars."""
    return [found.replace("\\|", "|") for found in CODE.findall(page)]


def queries(page: str) -> list[str]:
    """All PromQL: code with a metric's name, but not the names of single labels."""
    return [
        one for one in code(page) if NAME.search(one) and not one.startswith(("jq", "observe."))
    ]


def programs(page: str) -> list[str]:
    """The programs of all jq lines."""
    return [match[1] for one in code(page) if (match := re.search(r"^jq(?: -\w)* '(.*)'$", one))]


def names() -> set[str]:
    """The names of all samples that the page of metrics can have."""
    found: set[str] = set()
    for one in METRICS:
        suffixes = ("_bucket", "_sum", "_count", "") if one.kind is MetricKind.HISTOGRAM else ("",)
        found |= {one.name + suffix for suffix in suffixes}
    for family in text_string_to_metric_families(Metrics().page().decode()):
        found |= {sample.name for sample in family.samples}
    return found


def unknown(page: str) -> list[str]:
    """What the page names and the table of metrics does not have."""
    known = names()
    found = [name for one in code(page) for name in NAME.findall(one) if name not in known]
    for one in queries(page):
        for name, label, value in MATCHER.findall(one):
            suffixless = re.sub(r"_(bucket|sum|count)$", "", name)
            described = next((row for row in METRICS if row.name in (name, suffixless)), None)
            labels = {row.name: row for row in described.labels} if described is not None else {}
            if label not in labels or not set(value.split("|")) <= set(labels[label].known):
                found.append(f"{name}{{{label}={value}}}")
        rows = [row for row in METRICS if row.name in one]
        for by in re.findall(r"by \(([^)]*)\)", one):
            have = {"le", *(label for row in rows for label in row.label_names)}
            found += [label for label in by.split(", ") if label not in have]
    return found


def test_metrics_labels_and_values_exist() -> None:
    assert len(queries(PAGE)) > 40
    assert len(queries(ALERTS)) > 15
    assert unknown(PAGE) == unknown(ALERTS) == []


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("pdproxy_nothing_total", ["pdproxy_nothing_total"]),
        (
            'rate(pdproxy_alone_total{reason="nothing"}[5m])',
            ["pdproxy_alone_total{reason=nothing}"],
        ),
        ('pdproxy_alone_total{nothing="n"}', ["pdproxy_alone_total{nothing=n}"]),
        ("sum by (nothing) (rate(pdproxy_alone_total[5m]))", ["nothing"]),
        ("pdproxy_ttft_seconds_total", ["pdproxy_ttft_seconds_total"]),
    ],
)
def test_what_does_not_exist_is_found(query: str, found: list[str]) -> None:
    assert unknown(f"`{query}`") == found


def test_every_log_field_is_described() -> None:
    fields = {*access_fields(FULL), *access_fields(ALONE)}
    section = PAGE.partition("## Phases")[2]
    missing = [name for name in fields if f"`{name}`" not in section]
    assert missing == []
    assert [phase for phase, _ in PHASES if f"| `{phase}` |" not in section] == []


@pytest.mark.skipif(shutil.which("jq") is None, reason="no jq on this machine")
@pytest.mark.parametrize("program", programs(PAGE))
def test_a_jq_line_finds_something(program: str) -> None:
    """In a log with a slow request that failed on an engine, one that was served, and a refusal."""
    to_json = JsonFormatter()
    refused = Refused("wrong_key", "192.0.2.1")
    logged = [("request", access_fields(FULL)), ("request", access_fields(ALONE))]
    logged.append(("refused", {"reason": refused.reason, "client": refused.client}))
    log = "\n".join(
        to_json.line(0, "INFO", "pdproxy.access", message, fields) for message, fields in logged
    )
    slurp = ["-s"] if program.startswith("map(") else []
    done = subprocess.run(
        ["jq", "-c", *slurp, program.replace('"ID"', '"r"')],
        input=log,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "null" not in done.stdout.replace('"alone_ms":null', "")
    if slurp:
        assert json.loads(done.stdout) == {
            "key": "file:7",
            "requests": 2,
            "prompt": 70,
            "completion": 6,
        }
