"""The alerts, and what is recorded for them: each names its metrics as the code declares them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from pdproxy.app.credentials import CERTIFICATE_END, EXPIRES_SOON
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
from pdproxy.kit.errors import Wait
from pdproxy.observe import held_loop, slow, slow_clients
from pdproxy.observe.description import Description, Label, MetricKind
from pdproxy.observe.events import DEADLINES, EVICTIONS
from pdproxy.observe.prompt_shares import MOST, PROMPT_TOKENS
from pdproxy.observe.requests import LEG_FAILURES, NODE_LEGS, NODE_SECONDS, REFUSALS, REQUESTS
from pdproxy.serving.kv.custodian import HANDLES_ENDED, KV_HANDLE_AGE, KV_STUCK
from pdproxy.web.wrong_keys import WRONG_KEYS
from pdproxy.workers.shown_of_all import RESTARTS, SCHEDULER_RESTARTS
from tests.reference.promql import UP, Query, QueryError, Scope, of_process

JOB = "pdproxy"
"""The job of Prometheus that scrapes the proxies."""
PAGE = "docs/guide/alerts.md"
_OF = Scope({}, "5m")
_INSTANCE = Label("instance", text="the proxy, as Prometheus names it")
_NAME = re.compile(r"\{(\w+)\}")
_SHOWN_AS = {"seconds": "humanizeDuration", "ratio": "humanizePercentage"}
"""Prometheus' functions that write a value, by the value's unit."""


class Severity(Enum):
    """Who has to know, and when."""

    CRITICAL = "critical"
    """Requests fail now."""
    WARNING = "warning"
    """Requests are slow, or will fail."""
    INFO = "info"
    """Nothing has to be done at once."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A series that Prometheus computes. `metric`: as what it can be used in other queries."""

    metric: Description
    query: Query


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert. `query` has a series for each one that fires, `hold`: for how long it must have.

    In `summary` and `text`, `{label}` stands for a label's value, `{value}` for the series' own.
    """

    name: str
    severity: Severity
    query: Query
    hold: str
    summary: str
    text: str

    @property
    def runbook(self) -> str:
        """The section that says what to do."""
        return f"{PAGE}#{self.name.lower()}"

    def written(self, text: str) -> str:
        """Return a text as Prometheus' template.

        Raises:
            QueryError: it names a label that the query does not have.
        """

        def value(found: re.Match[str]) -> str:
            if found[1] == "value":
                return f"{{{{ $value | {_SHOWN_AS.get(self.query.unit, 'humanize')} }}}}"
            if found[1] not in self.query.labels:
                raise QueryError(f"{self.name}: {self.query.text} has no label {found[1]}")
            return f"{{{{ $labels.{found[1]} }}}}"

        return _NAME.sub(value, text)


def _record(name: str, text: str, query: Query, *labels: Label) -> Recorded:
    found = Description(name, MetricKind.GAUGE, text, query.unit, labels)
    if frozenset(found.label_names) != query.labels:
        raise QueryError(f"{name} has the labels {', '.join(sorted(query.labels))}")
    return Recorded(found, query)


def _legs(metric: Description) -> Query:
    return _OF.rate(metric).sum("instance", "node", "phase")


def _problem(cause: slow.Cause) -> Query:
    return _OF.now(slow.PROBLEMS, {"cause": cause.name}).sum("instance").above(0)


LEG_TIME = _record(
    "node_phase:pdproxy_node_leg_seconds:mean5m",
    "Mean seconds of each phase of an engine's legs",
    _legs(NODE_SECONDS)
    .over(_legs(NODE_LEGS), unit="seconds")
    .joined(_OF.now(NODE_INFO), ("instance", "node"), "role", "pool", "engine_pod"),
    _INSTANCE,
    *NODE_SECONDS.labels,
    *NODE_INFO.labels[1:4],
)
OUTCOMES = _record(
    "instance_outcome:pdproxy_requests:rate5m",
    "Requests that have ended",
    _OF.rate(REQUESTS).sum("instance", "outcome"),
    _INSTANCE,
    REQUESTS.labels[-1],
)
RECORDED = (LEG_TIME, OUTCOMES)
_ENDED = _OF.now(OUTCOMES.metric).sum("instance")
_PREFILL_TIME = _OF.now(LEG_TIME.metric, {"phase": "prefill"})
_CLIENTS_WINDOW = f"{slow_clients.WINDOW / 60:g}m"
_SLOW_READERS = _OF.increase(EVICTIONS, _CLIENTS_WINDOW, {"what": slow_clients.EVICTED})
_LATE_READERS = _OF.increase(DEADLINES, _CLIENTS_WINDOW, {"wait": Wait.CLIENT_WRITE.value})

SERVICE = (
    Alert(
        "PdproxyUnreachable",
        Severity.CRITICAL,
        _OF.now(UP, {"job": JOB}).equal(0),
        "1m",
        "Prometheus gets no metrics of pdproxy {instance}",
        "The process has ended, or Prometheus can't reach it or has no key for GET /metrics.",
    ),
    Alert(
        "PdproxyNotReady",
        Severity.CRITICAL,
        _OF.now(STATE, {"state": "not_ready"}).above(0),
        "2m",
        "pdproxy {instance} can serve no request",
        "GET /ready answers 503. Its reason says why: no decode or aggregated engine is up, no API "
        "key is valid, not all engines have been probed yet, or the proxy is shutting down.",
    ),
    Alert(
        "PdproxyDegraded",
        Severity.WARNING,
        _OF.now(STATE, {"state": "degraded"}).above(0),
        "2m",
        "pdproxy {instance} can split no prompt",
        "Every prompt is served by one engine alone: no prefill engine can be used together with "
        "a decode engine. The first detail of GET /ready says why.",
    ),
    Alert(
        "PdproxyNoEngineOfRole",
        Severity.CRITICAL,
        _OF.now(NODE_UP).max("instance", "role").equal(0),
        "1m",
        "pdproxy {instance}: no {role} engine can be used",
        "All engines of the role are down, stand still, or are excluded. GET /ready names each "
        "with its reason.",
    ),
    Alert(
        "PdproxyRequestsFail",
        Severity.CRITICAL,
        _OF.now(OUTCOMES.metric, {"outcome": ("engine", "ours")})
        .sum("instance")
        .over(_ENDED)
        .above(0.01),
        "5m",
        "pdproxy {instance}: {value} of the requests fail",
        "An engine failed, was too late or sent invalid data, and no other engine could answer; or "
        "pdproxy has a defect.",
    ),
    Alert(
        "PdproxyDefect",
        Severity.WARNING,
        _OF.increase(REQUESTS, "15m", {"outcome": "ours"}).sum("instance").above(0),
        "0m",
        "pdproxy {instance}: a defect has ended requests",
        "Requests have ended with the outcome ours. The log has the places in the code.",
    ),
    Alert(
        "PdproxyTaskFails",
        Severity.WARNING,
        _OF.increase(TASK_RESTARTS, "15m").sum("instance", "task").above(0),
        "0m",
        "pdproxy {instance}: the task {task} has failed",
        "A part that must always run has failed, and was started again. The log has the places in "
        "the code.",
    ),
)
ENGINES = (
    Alert(
        "PdproxyEngineDown",
        Severity.WARNING,
        _OF.now(NODE_STATE, {"state": "down"}).above(0),
        "1m",
        "pdproxy {instance}: the engine {node} is down",
        "Probes find the engine down: no connection, no TLS, an unhealthy core, or no model. GET "
        "/ready says which.",
    ),
    Alert(
        "PdproxyEngineStandsStill",
        Severity.WARNING,
        _OF.now(NODE_STATE, {"state": "stalled"}).above(0),
        "0m",
        "pdproxy {instance}: the engine {node} stands still",
        "The engine's API server answers, and there is no sign of its core: a GPU that hangs, or a "
        "stopped process.",
    ),
    Alert(
        "PdproxyEngineExcluded",
        Severity.WARNING,
        _OF.most(NODE_STATE, "5m", {"state": "excluded"}).above(0),
        "10m",
        "pdproxy {instance}: the engine {node} is excluded again and again",
        "Its breaker is open since it failed several times in a row, or it failed more often or "
        "was slower than the other engines.",
    ),
    Alert(
        "PdproxyEngineFails",
        Severity.WARNING,
        _OF.increase(LEG_FAILURES, "5m").sum("instance", "node", "phase").above(3),
        "5m",
        "pdproxy {instance}: the engine {node} fails in the phase {phase}",
        "{value} requests failed there in 5 minutes. Clients may have got their answers from other "
        "engines.",
    ),
    Alert(
        "PdproxyEnginesDisappear",
        Severity.WARNING,
        _OF.now(SUSPECTED, {"what": ("refused", "client")}).above(0),
        "0m",
        "pdproxy {instance}: engines disappeared under the same request or client",
        "Three engines or more ended while the same request, or requests of one client, were under "
        "way. The request is refused now, the client's requests are served few at a time.",
    ),
    Alert(
        "PdproxySourceSilent",
        Severity.WARNING,
        _OF.now(SOURCES[None][2]).above(300),
        "0m",
        "pdproxy {instance}: {source} has named no engines for {value}",
        "The engines of the last good answer stay in use. New engines are not found.",
    ),
)
WAITS = (
    Alert(
        "PdproxyQueueLong",
        Severity.WARNING,
        _OF.now(QUEUE).above(0),
        "5m",
        "pdproxy {instance}: requests wait for a place all the time",
        "{value} requests wait. All places are taken: more comes than the engines serve.",
    ),
    Alert(
        "PdproxyRefuses",
        Severity.CRITICAL,
        _OF.rate(REFUSALS, {"status": "503"}).sum("instance", "reason").over(_ENDED).above(0.01),
        "5m",
        "pdproxy {instance} refuses requests: {reason}",
        "{value} of the requests are refused with 503 for this reason.",
    ),
    Alert(
        "PdproxySlowPrefill",
        Severity.WARNING,
        _PREFILL_TIME.min("instance", "pool").above(10),
        "5m",
        "pdproxy {instance}: all prefill engines of the pool {pool} are slow",
        "The fastest of them needs {value} for a prompt, its queue included.",
    ),
    Alert(
        "PdproxySlowPrefillEngine",
        Severity.WARNING,
        _problem(slow.PREFILL),
        "5m",
        f"pdproxy {{instance}}: {slow.PREFILL.words}",
        "It needs more than three times as long for its prompts as the fastest of its pool, with "
        "placement auto beside what was predicted. GET /ready names it.",
    ),
    Alert(
        "PdproxyDecodeQueue",
        Severity.WARNING,
        _problem(slow.QUEUE),
        "5m",
        f"pdproxy {{instance}}: {slow.QUEUE.words}",
        "Requests wait in it for a place all the time, and their KV waits in prefill engines. GET "
        "/ready names it.",
    ),
    Alert(
        "PdproxyDecodeFull",
        Severity.WARNING,
        _problem(slow.FULL),
        "5m",
        f"pdproxy {{instance}}: {slow.FULL.words}",
        "Requests wait in it for KV blocks all the time. GET /ready names it.",
    ),
    Alert(
        "PdproxySlowKv",
        Severity.WARNING,
        _problem(slow.LINK),
        "5m",
        f"pdproxy {{instance}}: {slow.LINK.words}",
        "The first data of a decode engine comes late behind a prefill engine's KV, and no request "
        "waits there for a place. GET /ready names both.",
    ),
    Alert(
        "PdproxyPrefillIdle",
        Severity.WARNING,
        _OF.rate(PROMPT_TOKENS, {"served": "beside_idle"})
        .sum("instance")
        .over(_OF.rate(PROMPT_TOKENS).sum("instance"))
        .above(MOST),
        "5m",
        "pdproxy {instance}: decode engines compute whole prompts beside idle prefill engines",
        "{value} of the prompt tokens was computed by decode engines alone while a prefill engine "
        "had no request. GET /ready names the reasons.",
    ),
)
KV = (
    Alert(
        "PdproxyKvDoesNotMove",
        Severity.WARNING,
        _OF.now(TRANSFER_FAULTS).above(0),
        "1m",
        f"pdproxy {{instance}}: {slow.MOVES_NOT.words} ({{kind}})",
        "prefill: no decode engine can load a prefill engine's KV. decode: a decode engine can "
        "load no KV. link: KV does not get from one to the other. No prompt is split there. GET "
        "/ready names the engines.",
    ),
    Alert(
        "PdproxyKvRecomputed",
        Severity.WARNING,
        _OF.rate(KV_MOVED, {"result": "recomputed"})
        .sum("instance")
        .over(_OF.rate(KV_MOVED).sum("instance"))
        .above(0.01),
        "5m",
        f"pdproxy {{instance}}: {slow.RECOMPUTED.words}",
        "{value} of the prompt tokens never arrived by KV transfer. Clients get right answers, and "
        "late. GET /ready names the engine.",
    ),
    Alert(
        "PdproxyKvHandlesAtRisk",
        Severity.WARNING,
        _OF.now(KV_HANDLE_AGE, {"state": ("held", "asked", "releasing")}).above(20),
        "1m",
        "pdproxy {instance}: KV has been waiting in a prefill engine for {value} ({state})",
        "The engine frees KV after its lease, 30 s by default. Then the prompt is computed again.",
    ),
    Alert(
        "PdproxyKvLost",
        Severity.WARNING,
        _OF.increase(HANDLES_ENDED, "15m", {"end": ("lost", "expired", "stuck")})
        .sum("instance", "end")
        .above(5),
        "0m",
        "pdproxy {instance}: KV was not freed in time ({end})",
        "{value} handles ended so in 15 minutes. Their blocks stay in the engines for long, and "
        "fewer prompts fit.",
    ),
    Alert(
        "PdproxyKvStuck",
        Severity.WARNING,
        _OF.now(KV_STUCK).above(0),
        "5m",
        "pdproxy {instance}: requests of the decode engine {node} may wait for KV for ever",
        "{value} requests at most. They keep their blocks until the engine is started again.",
    ),
    Alert(
        "PdproxyKvEventsMissing",
        Severity.INFO,
        _OF.now(KV_EVENT_SOURCES, {"state": "not_connected"}).above(0),
        "5m",
        "pdproxy {instance}: KV events of engines do not come",
        "{value} ranks of engines have no connection. What is known of their prefix caches is old.",
    ),
    Alert(
        "PdproxyPairEjected",
        Severity.WARNING,
        _OF.increase(PAIRS_EJECTED, "1h").above(0),
        "0m",
        "pdproxy {instance}: engines counted different prompt lengths",
        "A prefill and a decode engine that have different tokenizers or chat templates share no "
        "prompt until one of them is restarted.",
    ),
)
PROCESS = (
    Alert(
        "PdproxyEventLoopHeld",
        Severity.WARNING,
        _OF.quantile(1 - held_loop.MANY, LOOP_LATENESS, "instance").above(held_loop.LATE),
        "10m",
        f"pdproxy {{instance}}: {slow.LOOP.words}",
        "One timer of a hundred is late by {value} or more, and so is all that clients get.",
    ),
    Alert(
        "PdproxySlowClients",
        Severity.INFO,
        _SLOW_READERS.sum("instance").plus(_LATE_READERS.sum("instance")).above(slow_clients.MANY),
        "0m",
        f"pdproxy {{instance}}: {slow.CLIENTS.words}",
        "{value} connections were closed in 15 minutes since their clients read too slowly.",
    ),
    Alert(
        "PdproxyWrongKeys",
        Severity.WARNING,
        _OF.increase(WRONG_KEYS, "15m", {"answer": "throttled"})
        .sum("instance", "listener")
        .above(0),
        "0m",
        "pdproxy {instance}: an address sends many wrong keys ({listener})",
        "{value} requests with wrong keys were refused with 429 in 15 minutes. Somebody guesses "
        "keys, or a client has an old one.",
    ),
    Alert(
        "PdproxyWorkerRestarts",
        Severity.WARNING,
        _OF.increase(RESTARTS, "15m").above(0),
        "0m",
        "pdproxy {instance}: a worker was started again",
        "It had ended or was killed. The streams that it served were cut.",
    ),
    Alert(
        "PdproxySchedulerRestarts",
        Severity.WARNING,
        _OF.increase(SCHEDULER_RESTARTS, "15m").above(0),
        "0m",
        "pdproxy {instance}: the scheduler process was started again",
        "It had ended or was killed. Requests that needed an engine then waited, or were refused.",
    ),
    Alert(
        "PdproxySettingsRefused",
        Severity.WARNING,
        _OF.now(REFUSED).above(0),
        "1m",
        "pdproxy {instance}: the settings file can't be used",
        "The file was changed and has mistakes: the former settings stay in force, and the process "
        "could not start again. GET /ready says why.",
    ),
    Alert(
        "PdproxyCertificateExpires",
        Severity.WARNING,
        _OF.now(CERTIFICATE_END).from_now().below(EXPIRES_SOON.total_seconds()),
        "10m",
        "pdproxy {instance}: the certificate of {setting} expires in {value}",
        "It was not renewed. Behind its end, clients or engines refuse it.",
    ),
    Alert(
        "PdproxyFewOpenFiles",
        Severity.WARNING,
        _OF.now(of_process("process_open_fds"))
        .over(_OF.now(of_process("process_max_fds")))
        .above(0.9),
        "5m",
        "pdproxy {instance} can hardly open more files",
        "{value} of the files that it may have open are open. At 100 % it refuses connections.",
    ),
)
GROUPS = {
    "service": SERVICE,
    "engines": ENGINES,
    "waits": WAITS,
    "kv": KV,
    "process": PROCESS,
}
ALERTS = tuple(alert for alerts in GROUPS.values() for alert in alerts)
