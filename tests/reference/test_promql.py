"""A query of a metric, label or value that does not exist is an error where it is made."""

from collections.abc import Callable

import pytest

from pdproxy.app.gauges import STATE
from pdproxy.fleet.gauges import NODE_INFO, NODE_UP
from pdproxy.observe.requests import LEG_FAILURES, PHASE
from tests.reference.alerts import ALERTS, LEG_TIME, PAGE, Alert, Severity
from tests.reference.boards import BOARDS
from tests.reference.markdown import ROOT
from tests.reference.panels import Board, Panel
from tests.reference.promql import Query, QueryError, Scope, of_process

ALL = Scope({}, "5m")
CHOSEN = Scope({"instance": "$instance", "node": "$engine"}, "1m")
FAILURES = ALL.rate(LEG_FAILURES)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ALL.now(STATE, {"state": "bad"}), "pdproxy_state has no state bad"),
        (lambda: ALL.now(STATE, {"node": "a"}), "pdproxy_state has no label node"),
        (lambda: ALL.now(STATE, {"state": ("ok", "bad")}), "pdproxy_state has no state bad"),
        (lambda: ALL.rate(STATE), "pdproxy_state is a gauge, not a counter"),
        (lambda: ALL.now(PHASE), "pdproxy_phase_seconds is a histogram, not a gauge"),
        (lambda: ALL.now(STATE).sum("node"), "has no label node"),
        (lambda: ALL.mean(PHASE, "node"), "has no label node"),
        (lambda: ALL.now(STATE).joined(ALL.now(NODE_INFO), ("node",), "pool"), "no label node"),
        (lambda: ALL.now(NODE_UP).joined(ALL.now(NODE_INFO), ("node",), "rank"), "no label rank"),
        (lambda: FAILURES.sum("node").over(FAILURES.sum("phase")), "has no label phase"),
        (lambda: FAILURES.sum("node").plus(FAILURES.sum("phase")), "has other labels"),
        (lambda: of_process("process_hats"), "no process shows process_hats"),
        (lambda: board(FAILURES.sum("node"), "{phase}").page(), "no label phase for its legend"),
        (
            lambda: board(FAILURES.sum("node"), "", ALL.now(NODE_UP).sum("node")).page(),
            "values of several units: bool, legs per second",
        ),
        (
            lambda: Alert("A", Severity.INFO, FAILURES.sum("node"), "5m", "{role}", "").written(
                "{role}"
            ),
            "has no label role",
        ),
    ],
)
def test_what_does_not_exist_is_found(make: Callable[[], object], why: str) -> None:
    with pytest.raises(QueryError, match=why):
        make()


def board(query: Query, legend: str, *more: Query) -> Board:
    queries = [(query, legend), *((one, "") for one in more)]
    return Board("b", "board", "A board.", [("Row", [Panel("Panel", "A panel.", queries)])])


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (CHOSEN.now(STATE, {"state": "ok"}), 'pdproxy_state{instance=~"$instance", state="ok"}'),
        (
            CHOSEN.rate(LEG_FAILURES, {"phase": ("prefill", "decode")}).sum("node"),
            (
                "sum by (node) (rate(pdproxy_leg_failures_total"
                '{instance=~"$instance", node=~"$engine", phase=~"prefill|decode"}[1m]))'
            ),
        ),
        (
            ALL.quantile(0.95, PHASE, "phase"),
            "histogram_quantile(0.95, sum by (le, phase) (rate(pdproxy_phase_seconds_bucket[5m])))",
        ),
        (
            FAILURES.sum("node").over(FAILURES.sum()),
            (
                "sum by (node) (rate(pdproxy_leg_failures_total[5m])) / on () group_left () "
                "sum (rate(pdproxy_leg_failures_total[5m]))"
            ),
        ),
    ],
)
def test_a_query_is_written_as_prometheus_reads_it(query: Query, text: str) -> None:
    assert query.text == text


def test_what_is_recorded_is_queried_as_other_metrics_are() -> None:
    assert ALL.now(LEG_TIME.metric, {"phase": "kv"}).text == (
        'node_phase:pdproxy_node_leg_seconds:mean5m{phase="kv"}'
    )
    with pytest.raises(QueryError, match="has no phase nothing"):
        ALL.now(LEG_TIME.metric, {"phase": "nothing"})


def test_panels_and_alerts_are_described_in_sentences() -> None:
    titles = [(one.name, panel.title) for one in BOARDS for panel in one.panels]
    assert len(set(titles)) == len(titles) > 100
    texts = [panel.description for one in BOARDS for panel in one.panels]
    texts += [alert.text for alert in ALERTS]
    assert [text for text in texts if not text.endswith(".")] == []
    assert [text for text in texts if "Stays 0" in text and "else it is empty" in text] == []


def test_each_alert_has_a_section_that_says_what_to_do() -> None:
    sections = (ROOT / PAGE).read_text().split("\n## Pdproxy")[1:]
    assert [f"Pdproxy{one.splitlines()[0]}" for one in sections] == [one.name for one in ALERTS]
    for one in sections:
        name, _, meaning, *lines = one.splitlines()
        assert meaning[0].isupper(), name
        parts = [line.partition(":")[0] for line in lines if line.startswith("- **")]
        assert parts == ["- **Cause**", "- **Do**"], name
