"""Each alert fires on what it is for and stays silent just below: Prometheus' own judgement of the
rules.
"""

# Needs promtool on PATH.

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdproxy.app.credentials import CERTIFICATE_END
from pdproxy.app.gauges import STATE, TASK_RESTARTS
from pdproxy.app.heartbeat import LOOP_LATENESS
from pdproxy.app.reloading import REFUSED
from pdproxy.app.sources import METRICS as SOURCES
from pdproxy.deciding.engines_lost import SUSPECTED
from pdproxy.deciding.local_admission import QUEUE
from pdproxy.fleet.audit import KV_MOVED, PAIRS_EJECTED
from pdproxy.fleet.gauges import NODE_INFO, NODE_STATE, NODE_UP
from pdproxy.fleet.kv_sources import KV_EVENT_SOURCES
from pdproxy.fleet.transfers import TRANSFER_FAULTS
from pdproxy.observe.description import Description
from pdproxy.observe.events import DEADLINES, EVICTIONS
from pdproxy.observe.prompt_shares import PROMPT_TOKENS
from pdproxy.observe.requests import LEG_FAILURES, NODE_LEGS, NODE_SECONDS, REFUSALS, REQUESTS
from pdproxy.observe.slow import PROBLEMS
from pdproxy.serving.kv.custodian import HANDLES_ENDED, KV_HANDLE_AGE, KV_STUCK
from pdproxy.web.wrong_keys import WRONG_KEYS
from pdproxy.workers.shown_of_all import RESTARTS, SCHEDULER_RESTARTS
from tests.reference.alerts import ALERTS, JOB
from tests.reference.markdown import ROOT
from tests.reference.promql import UP, of_process

RULES = ROOT / "configs" / "prometheus" / "rules.yml"
DAY = 86_400
AT, EVERY = "30m", "30s"
"""When alerts are looked at, and how often series have values."""
Input = dict[str, str]


def given(metric: Description, values: str, *labels: str, part: str = "", more: str = "") -> Input:
    """Return a series of a metric by the values of its labels, in promtool's notation."""
    for label, value in zip(metric.labels, labels, strict=True):
        assert not label.known or value in label.known, (metric.name, label.name, value)
    named = zip(metric.label_names, labels, strict=True)
    pairs = ['instance="p:8000"', f'job="{JOB}"', *(f'{name}="{value}"' for name, value in named)]
    return {"series": f"{metric.name}{part}{{{','.join(pairs)}{more}}}", "values": values}


def steady(value: float) -> str:
    return f"{value:g}x120"


def growing(per_minute: float) -> str:
    return f"0+{per_minute / 2:g}x120"


def once(count: int, minute: int = 25) -> str:
    """Values of a counter that grows in this minute."""
    return f"0x{2 * minute - 1} {count}x{120 - 2 * minute}"


def late(seconds: float) -> str:
    """Values of a gauge that has a value from 20 s before the look on."""
    return f"0x59 {seconds:g}x60"


def requests(outcome: str, per_minute: float) -> Input:
    return given(REQUESTS, growing(per_minute), "m", "/v1/completions", outcome)


def legs(node: str, role: str, phase: str, seconds: float) -> list[Input]:
    """Return the series of an engine with 6 legs per minute of so many seconds each."""
    return [
        given(NODE_LEGS, growing(6), node, phase),
        given(NODE_SECONDS, growing(6 * seconds), node, phase),
        given(NODE_INFO, steady(1), node, role, "default", "", ""),
    ]


def beats(late_part: float) -> list[Input]:
    """Return the series of an event loop of which this part of the timers is late by 0.3 s."""
    return [
        given(
            LOOP_LATENESS,
            growing(600 * (1 if bound >= 0.5 else 1 - late_part)),
            part="_bucket",
            more=f',le="{bound}"',
        )
        for bound in (*LOOP_LATENESS.bounds, float("inf"))
        if bound <= 0.05 or bound >= 0.5
    ]


class Case(NamedTuple):
    """What makes an alert fire, and what does not quite."""

    alert: str
    fires: list[Input]
    silent: list[Input]


CASES = [
    Case("PdproxyUnreachable", [given(UP, steady(0))], [given(UP, steady(1))]),
    Case(
        "PdproxyNotReady",
        [given(STATE, steady(1), "not_ready")],
        [given(STATE, late(1), "not_ready"), given(STATE, steady(1), "degraded")],
    ),
    Case(
        "PdproxyDegraded",
        [given(STATE, steady(0.5), "degraded")],
        [given(STATE, late(1), "degraded"), given(STATE, steady(1), "ok")],
    ),
    Case(
        "PdproxyNoEngineOfRole",
        [
            given(NODE_UP, steady(0), "a", "prefill"),
            given(NODE_UP, steady(0), "b", "prefill"),
            given(NODE_UP, steady(1), "c", "decode"),
        ],
        [given(NODE_UP, steady(0), "a", "prefill"), given(NODE_UP, steady(1), "b", "prefill")],
    ),
    Case(
        "PdproxyRequestsFail",
        [requests("ok", 97), requests("engine", 2), requests("ours", 1)],
        [requests("ok", 90), requests("engine", 0.5), requests("client", 9)],
    ),
    Case(
        "PdproxyDefect",
        [given(REQUESTS, once(1), "m", "/v1/completions", "ours")],
        [given(REQUESTS, once(1, 10), "m", "/v1/completions", "ours")],
    ),
    Case(
        "PdproxyTaskFails",
        [given(TASK_RESTARTS, once(1), "probes")],
        [given(TASK_RESTARTS, once(1, 10), "probes")],
    ),
    Case(
        "PdproxyEngineDown",
        [given(NODE_STATE, steady(1), "a", "down")],
        [given(NODE_STATE, late(1), "a", "down"), given(NODE_STATE, steady(1), "b", "draining")],
    ),
    Case(
        "PdproxyEngineStandsStill",
        [given(NODE_STATE, late(1), "a", "stalled")],
        [given(NODE_STATE, steady(1), "a", "asleep")],
    ),
    Case(
        "PdproxyEngineExcluded",
        [given(NODE_STATE, "1 0 0 0 0 0 0 0 0 " * 12, "a", "excluded")],
        [given(NODE_STATE, "0x50 1 0x60", "a", "excluded")],
    ),
    Case(
        "PdproxyEngineFails",
        [given(LEG_FAILURES, growing(1), "a", "prefill")],
        [given(LEG_FAILURES, growing(0.5), "a", "prefill")],
    ),
    Case(
        "PdproxyEnginesDisappear",
        [given(SUSPECTED, late(1), "refused")],
        [given(SUSPECTED, steady(2), "one_engine")],
    ),
    Case(
        "PdproxySourceSilent",
        [given(SOURCES[None][2], steady(400), "dns://engines:8000")],
        [given(SOURCES[None][2], steady(100), "dns://engines:8000")],
    ),
    Case("PdproxyQueueLong", [given(QUEUE, steady(1))], [given(QUEUE, "9 9 9 9 0 " * 24)]),
    Case(
        "PdproxyRefuses",
        [requests("ok", 90), given(REFUSALS, growing(3), "queue_full", "503")],
        [
            requests("ok", 90),
            given(REFUSALS, growing(0.5), "queue_full", "503"),
            given(REFUSALS, growing(50), "key_requests", "429"),
        ],
    ),
    Case(
        "PdproxySlowPrefill",
        [*legs("a", "prefill", "prefill", 11), *legs("b", "prefill", "prefill", 12)],
        [*legs("a", "prefill", "prefill", 9), *legs("b", "prefill", "prefill", 12)],
    ),
    Case(
        "PdproxySlowPrefillEngine",
        [given(PROBLEMS, steady(1), "slow_prefill")],
        [given(PROBLEMS, late(1), "slow_prefill")],
    ),
    Case(
        "PdproxyDecodeQueue",
        [given(PROBLEMS, steady(1), "decode_queue")],
        [given(PROBLEMS, late(1), "decode_queue")],
    ),
    Case(
        "PdproxyDecodeFull",
        [given(PROBLEMS, steady(1), "decode_full")],
        [given(PROBLEMS, late(1), "decode_full")],
    ),
    Case(
        "PdproxySlowKv",
        [given(PROBLEMS, steady(1), "slow_link")],
        [given(PROBLEMS, late(1), "slow_link")],
    ),
    Case(
        "PdproxyPrefillIdle",
        [
            given(PROMPT_TOKENS, growing(60), "split", "none"),
            given(PROMPT_TOKENS, growing(40), "beside_idle", "no_pair"),
        ],
        [
            given(PROMPT_TOKENS, growing(70), "split", "none"),
            given(PROMPT_TOKENS, growing(30), "beside_idle", "no_pair"),
        ],
    ),
    Case(
        "PdproxyKvDoesNotMove",
        [given(TRANSFER_FAULTS, steady(1), "link")],
        [given(TRANSFER_FAULTS, late(1), "link")],
    ),
    Case(
        "PdproxyKvRecomputed",
        [
            given(KV_MOVED, growing(98), "transferred"),
            given(KV_MOVED, growing(2), "recomputed"),
        ],
        [
            given(KV_MOVED, growing(999), "transferred"),
            given(KV_MOVED, growing(1), "recomputed"),
        ],
    ),
    Case(
        "PdproxyKvHandlesAtRisk",
        [given(KV_HANDLE_AGE, steady(25), "held")],
        [given(KV_HANDLE_AGE, steady(15), "held"), given(KV_HANDLE_AGE, steady(60), "promised")],
    ),
    Case(
        "PdproxyKvLost",
        [given(HANDLES_ENDED, once(9), "lost")],
        [given(HANDLES_ENDED, once(3), "lost"), given(HANDLES_ENDED, once(90), "released")],
    ),
    Case("PdproxyKvStuck", [given(KV_STUCK, steady(2), "a")], [given(KV_STUCK, late(2), "a")]),
    Case(
        "PdproxyKvEventsMissing",
        [given(KV_EVENT_SOURCES, steady(1), "not_connected")],
        [given(KV_EVENT_SOURCES, late(1), "not_connected")],
    ),
    Case(
        "PdproxyPairEjected",
        [given(PAIRS_EJECTED, once(1))],
        [given(PAIRS_EJECTED, steady(1))],
    ),
    Case("PdproxyEventLoopHeld", beats(0.05), beats(0.001)),
    Case(
        "PdproxySlowClients",
        [given(EVICTIONS, once(8), "reader"), given(DEADLINES, once(8), "client_write")],
        [given(EVICTIONS, once(5), "reader"), given(DEADLINES, once(5), "client_write")],
    ),
    Case(
        "PdproxyWrongKeys",
        [given(WRONG_KEYS, once(1), "clients", "throttled")],
        [given(WRONG_KEYS, growing(9), "clients", "refused")],
    ),
    Case("PdproxyWorkerRestarts", [given(RESTARTS, once(1))], [given(RESTARTS, once(1, 10))]),
    Case(
        "PdproxySchedulerRestarts",
        [given(SCHEDULER_RESTARTS, once(1))],
        [given(SCHEDULER_RESTARTS, once(1, 10))],
    ),
    Case(
        "PdproxySettingsRefused",
        [given(REFUSED, steady(1))],
        [given(REFUSED, late(1))],
    ),
    Case(
        "PdproxyCertificateExpires",
        [given(CERTIFICATE_END, steady(2 * DAY), "listen.tls.certificate")],
        [given(CERTIFICATE_END, steady(2.1 * DAY), "listen.tls.certificate")],
    ),
    Case(
        "PdproxyFewOpenFiles",
        [
            given(of_process("process_open_fds"), steady(950)),
            given(of_process("process_max_fds"), steady(1000)),
        ],
        [
            given(of_process("process_open_fds"), steady(850)),
            given(of_process("process_max_fds"), steady(1000)),
        ],
    ),
]
WRITTEN = {
    "PdproxyNoEngineOfRole": "pdproxy p:8000: no prefill engine can be used",
    "PdproxyRequestsFail": "pdproxy p:8000: 3% of the requests fail",
    "PdproxyKvHandlesAtRisk": "pdproxy p:8000: KV has been waiting in a prefill engine for 25s (held)",  # noqa: E501
    "PdproxyEngineDown": "pdproxy p:8000: the engine a is down",
}
"""Summaries as people get them."""


def looked(name: str, series: list[Input], *, fires: bool) -> dict[str, Any]:
    """Return a test of promtool: whether one alert of this name is firing."""
    firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "name": f"{name} {'fires' if fires else 'is silent'}",
        "interval": EVERY,
        "input_series": series,
        "promql_expr_test": [{"expr": firing, "eval_time": AT, "exp_samples": samples}],
    }


def promtool(*words: str) -> str:
    done = subprocess.run(
        ["promtool", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_rules_are_valid() -> None:
    said = promtool("check", "rules", str(RULES))
    print(f"promtool: {said.splitlines()[1].strip()}")


def test_each_alert_fires_and_stays_silent(tmp_path: Path) -> None:
    assert [case.alert for case in CASES] == [alert.name for alert in ALERTS]
    file = tmp_path / "tests.yml"
    found = [looked(case.alert, case.fires, fires=True) for case in CASES]
    found += [looked(case.alert, case.silent, fires=False) for case in CASES]
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": EVERY, "tests": found})
    )
    promtool("test", "rules", str(file))
    print(f"promtool: {len(CASES)} alerts fire, and stay silent just below")


@pytest.mark.parametrize(("name", "summary"), WRITTEN.items())
def test_an_alert_is_written_as_people_read_it(name: str, summary: str, tmp_path: Path) -> None:
    """With the values of labels, and numbers in their units."""
    (case,) = (case for case in CASES if case.alert == name)
    text = json.dumps(
        {
            "rule_files": [str(RULES)],
            "evaluation_interval": EVERY,
            "tests": [
                {
                    "interval": EVERY,
                    "input_series": case.fires,
                    "alert_rule_test": [{"eval_time": AT, "alertname": name, "exp_alerts": []}],
                }
            ],
        }
    )
    file = tmp_path / "tests.yml"
    file.write_text(text)
    with pytest.raises(AssertionError) as error:
        promtool("test", "rules", str(file))
    assert f'summary="{summary}"' in str(error.value)
