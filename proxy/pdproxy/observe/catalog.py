"""The table of all metrics of pdproxy: name, type, help, unit, labels and their values. Only data.

The page of `/metrics` and its reference in the documentation are made from it. Everything that counts or reads a value uses a
row of this table. The process's own metrics (`process_*`, `python_*`) are those of `prometheus_client`, and are not in it.
"""

from __future__ import annotations

from pdproxy.kit.errors import Fault, Wait
from pdproxy.observe import (
    catalog_continuations,
    catalog_decisions,
    catalog_fleet,
    catalog_health,
    catalog_kv_events,
    catalog_peers,
    catalog_prefixes,
    catalog_refusals,
    catalog_turns,
    catalog_workers,
)
from pdproxy.observe.description import NODE, Description, Kind, Label
from pdproxy.observe.events import ITL_BOUNDS

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds in seconds for phases of a request."""
LATENESS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds for the event loop's delay."""


def _counter(
    name: str, unit: str, text: str, *labels: Label, together: tuple[tuple[str, ...], ...] | None = None
) -> Description:
    return Description(name, Kind.COUNTER, text, unit, labels, together=together)


def _gauge(name: str, unit: str, text: str, *labels: Label) -> Description:
    return Description(name, Kind.GAUGE, text, unit, labels)


def _histogram(name: str, text: str, *labels: Label, bounds: tuple[float, ...] = SECONDS) -> Description:
    return Description(name, Kind.HISTOGRAM, text, "seconds", labels, bounds)


ROLE = Label("role", text="prefill, decode, aggregated or any")
REMOVED = "removed"
"""The value of `node` for engines that are not in the pool any more."""

OUTCOMES = (
    ("ok", "answered"),
    (Fault.CLIENT.value, "the request was refused: it is wrong, or it has no valid key"),
    (Fault.ENGINE.value, "an engine failed, was too late, or sent invalid data"),
    (Fault.CAPACITY.value, "no place, no engine, or shutting down"),
    (Fault.OURS.value, "a defect of pdproxy"),
    (Fault.CLIENT_LEFT.value, "the client closed its connection before the end"),
)
ALONE = (
    ("n", "several choices, which only one engine alone can sample"),
    ("echo", "the client wants its prompt back"),
    ("prompt_logprobs", "the client wants log probabilities of its prompt"),
    ("beam_search", "beam search"),
    ("non_text", "the prompt is not only text"),
    ("prompt_ids", "a chat's prompt comes as token ids in kv_transfer_params"),
    ("short_prompt", "the prompt is too short to be split"),
    ("unusual", "a request that cannot be split for another reason"),
    ("no_pair", "no prefill engine was free or could be paired with a decode engine"),
    ("prefill_refused", "a prefill engine refused the prompt"),
    ("prefill_failed", "the prefill failed"),
    ("no_handle", "the prefill engine gave no usable handle"),
    ("no_tokens", "the prompt's token ids, which the connector needs, could not be made"),
    ("kv_buffer", "the KV does not fit into a receive buffer"),
    ("kv_late", "the notice that the KV is ready did not come in time"),
    ("kv_failed", "decode engines could not load the KV of this prompt, and one try was left"),
    ("first_token", "the prefill engine's first token cannot begin the answer"),
    ("decided", "the placement chose one engine: the prompt could have been split"),
)
_OTHER_WAITS = {
    Wait.STALLED: "health.stalled_after",
    Wait.ENGINE: "deadlines.queue, for an engine that stands still",
    Wait.CANARY: "health.canary_timeout",
    Wait.DNS: "dns.timeout",
}
WAITS = tuple((wait.value, _OTHER_WAITS.get(wait, f"deadlines.{wait.value}")) for wait in Wait)
EVICTED = (
    ("queue", "a request that waited for a place"),
    ("body", "a body that was not complete"),
    ("connection", "an idle connection"),
    ("reader", "a stream that was read too slowly"),
    ("answer", "an answer that was not read"),
)
ENDS = (
    ("loaded", "the decode engine has it"),
    ("released", "pdproxy released it"),
    ("refused", "the decode engine refused the request and released it"),
    ("aborted", "the decode engine had it when its request was closed, and frees it"),
    ("lost", "it could not be released: the prefill engine frees it after its own time"),
    ("expired", "the prefill engine reported that its time is over"),
    ("not_made", "the prefill failed or was closed while a decode engine was asked at the same time: there was no KV"),
    ("stuck", "it was not made, or not pushed, and the decode engine may wait for it: see pdproxy_kv_stuck"),
)
NOTICES = ("ready", "loaded", "failed", "released", "expired", "kept")
NOTICE_RESULTS = (
    ("awaited", "a prompt waited for it"),
    ("double", "its rank had sent one already"),
    ("early", "nothing waits for it yet"),
    ("late", "nothing waits for it any more"),
    ("unknown", "it was early, and nothing waited for it later"),
    ("undecodable", "it is not a notice"),
    ("known", "it is about a handle that has not ended"),
    ("over", "it is about a handle that has ended"),
    ("given_up", "its client had left, and the KV is released"),
    ("not_passed", "it was for another worker, and too much waited to be passed on"),
)
_READY_RESULTS = ("awaited", "double", "early", "late", "unknown")
_TOGETHER = (
    *(("ready", result) for result in _READY_RESULTS),
    *((event, result) for event in NOTICES for result in ("known", "over", "given_up")),
    *((event, "not_passed") for event in NOTICES),
    ("unknown", "undecodable"),
)
PHASES = (
    ("queue", "from a request's complete body to its place (limits.max_inflight)"),
    ("prefill", "a prompt: the prefill leg, from its start to its answer"),
    ("kv", "a split prompt's stream: from asking the decode engine to its first data: the KV transfer and one step"),
    ("decode", "a prompt's stream: from the engine's first data to its end"),
    (
        "decode_whole",
        "a split prompt's answer that is not streamed: the decode leg: KV transfer and decode, not known apart",
    ),
    ("alone", "a stream of one engine alone: from asking it to its first data: its own queue and prefill"),
    ("alone_whole", "an answer of one engine alone that is not streamed: its whole leg"),
    ("total", "from a request's complete body to its end"),
)
LEG_PHASES = PHASES[1:-1]
RESULTS_OF_TOKENIZING = (
    ("ok", "ids were made"),
    ("off", "they are not made here for this model: its canaries differ, or are not known"),
    ("unsure", "only an engine knows the ids of this request"),
    ("rejected", "the template or the engine rejected the request"),
    ("late", "they did not come in deadlines.tokenize"),
    ("busy", "too many prompts wait for the threads"),
    ("long", "the prompt is too long to be tokenized here"),
    ("failed", "the tokenizer or the engine failed"),
)
_ROLE_PHASES = {
    "prefill": ("prefill",),
    "decode": ("kv", "decode", "decode_whole", "alone", "alone_whole"),
    "aggregated": ("decode", "alone", "alone_whole"),
    "any": ("prefill", "kv", "decode", "decode_whole", "alone", "alone_whole"),
}


def phases_of(role: str) -> tuple[str, ...]:
    """Return the phases of an engine's legs by its role."""
    return _ROLE_PHASES.get(role, ())


_PATH = Label("path", (("split", "prefill and decode by two engines"), ("alone", "one engine")))
_SOURCE = Label("source", (("here", "in this process"), ("engine", "by an engine's /tokenize")))
_STATES = (
    ("promised", "both engines were asked at the same time, and the prefill engine has not answered yet"),
    ("held", "no decode engine was asked"),
    ("asked", "a decode engine was sent the handle, and has shown nothing yet"),
    ("releasing", "it is being released"),
)
FAILED_LEGS = (
    ("prefill", "the prefill leg"),
    ("decode", "the leg that answers, also of an engine that serves alone"),
    ("alone", "a leg of a route that one engine always serves alone"),
)

REQUESTS = _counter(
    "pdproxy_requests_total",
    "requests",
    "Requests of engines' routes that have ended, however: also those with a wrong key, and those that no engine was asked for. "
    "What was refused before its body was complete is in pdproxy_early_refusals_total only",
    Label("model", text='a model that an engine lists and that was served; else "other"'),
    Label("endpoint", text="the route's path"),
    Label("outcome", OUTCOMES),
)
REFUSALS_NOT_LOGGED = _counter(
    "pdproxy_refused_not_logged_total",
    "lines",
    "Log lines about refusals, and about requests without a valid key, that were left out: too many came within a second, or of "
    "one client within a minute",
)
ALONES = _counter(
    "pdproxy_alone_total",
    "prompts",
    "Prompts given to one engine alone on routes that can be split; one counts again if its reason changes",
    Label("reason", ALONE),
)
DEADLINES = _counter("pdproxy_deadline_total", "waits", "Waits ended by their deadline", Label("wait", WAITS))
SILENCES_ALLOWED = _counter(
    "pdproxy_silences_allowed_total",
    "waits",
    "Waits for a silent engine that went on behind their deadline, because it was seen to work",
    Label("wait", tuple(one for one in WAITS if one[0] in ("prefill", "first_token", "between_tokens"))),
)
EVICTIONS = _counter(
    "pdproxy_evicted_total",
    "evictions",
    "What was taken from clients that held more than their share while others waited",
    Label("what", EVICTED),
)
HANDLES_ENDED = _counter("pdproxy_kv_handles_ended_total", "handles", "KV handles that have ended", Label("end", ENDS))
KV_MOVED = _counter(
    "pdproxy_kv_moved_total",
    "tokens",
    "Prompt tokens (whole blocks) sent to decode engines by KV transfer, by what those engines' own counters show",
    Label("result", (("transferred", "they arrived"), ("recomputed", "they did not: the engine computed them again"))),
)
KV_NOTICES = _counter(
    "pdproxy_kv_notices_total",
    "notices",
    "Notices of KV transfers, by what pdproxy did with them",
    Label("event", (*((event, f"the engine's event {event}") for event in NOTICES), ("unknown", "not decodable"))),
    Label("result", NOTICE_RESULTS),
    together=_TOGETHER,
)
SILENT_RANKS = _counter(
    "pdproxy_kv_silent_ranks_total",
    "notices",
    "Notices that did not come before deadlines.kv_ready, by the rank that did not send one",
    NODE,
    Label("rank", text='the rank\'s number; "unnamed" if notices name none, "more" after 64'),
)
KV_BYTES = _counter("pdproxy_kv_transfer_bytes_total", "bytes", "Bytes of KV that decode engines reported as loaded")
LEG_FAILURES = _counter(
    "pdproxy_leg_failures_total",
    "legs",
    "Legs that failed, also in the middle of a stream; an engine that refuses what is wrong with the request has not failed",
    NODE,
    Label("phase", FAILED_LEGS),
)
NODE_LEGS = _counter(
    "pdproxy_node_legs_total",
    "legs",
    "Measured phases of legs: by pdproxy_node_leg_seconds_total, the mean time of each engine",
    NODE,
    Label("phase", LEG_PHASES),
)
NODE_SECONDS = _counter(
    "pdproxy_node_leg_seconds_total",
    "seconds",
    "Seconds of the phases of legs, summed up for each engine; phases as in pdproxy_phase_seconds",
    NODE,
    Label("phase", LEG_PHASES),
)
PAIRS_EJECTED = _counter(
    "pdproxy_pairs_ejected_total", "pairs", "Pairs ejected because they counted different prompt lengths"
)
TOKENIZED = _counter(
    "pdproxy_tokenize_total",
    "prompts",
    "Prompts whose token ids were requested before an engine gets them; a prompt counts once per source",
    _SOURCE,
    Label("result", RESULTS_OF_TOKENIZING),
)
TOKENS = _counter(
    "pdproxy_tokens_total",
    "tokens",
    "Tokens of requests that have ended, as engines reported them on any route; without a report what is known: the prompt by "
    "the prefill engine or by its bytes, the answer by the token ids or the events that were seen",
    Label("kind", (("prompt", "tokens of prompts"), ("completion", "generated tokens"))),
)
TASK_RESTARTS = _counter(
    "pdproxy_task_restarts_total",
    "failures",
    "Failures of background tasks that must always run, and that were started again",
    Label("task", text="the task's name"),
)
LINES_DROPPED = _counter(
    "pdproxy_log_lines_dropped_total",
    "lines",
    "Log lines that were dropped, since standard error was not read or could not be written",
)

TTFT = _histogram(
    "pdproxy_ttft_seconds",
    "Seconds from the complete body of a request with a stream to the first data that was sent. Answers that are not streamed "
    "do not count",
    _PATH,
)
OVERLAP = _histogram(
    "pdproxy_legs_overlap_seconds",
    "Seconds in which both engines of a prompt had been asked and the prefill engine had not answered yet (connectors whose "
    "legs run at once)",
)
ITL = _histogram(
    "pdproxy_itl_seconds",
    "Seconds between the events of a stream; events that come in one read have none between them",
    bounds=ITL_BOUNDS,
)
PHASE = _histogram(
    "pdproxy_phase_seconds",
    "Seconds of each phase: queue and total once per request, the others once per prompt, of its last attempt",
    Label("phase", PHASES),
)
LOOP_LATENESS = _histogram(
    "pdproxy_loop_lateness_seconds",
    "Seconds by which the event loop called a timer late, measured every 0.1 s",
    bounds=LATENESS,
)
KV_SECONDS = _histogram("pdproxy_kv_transfer_seconds", "Seconds of KV transfers, as decode engines reported them")
KV_READY_WAIT = _histogram(
    "pdproxy_kv_ready_wait_seconds",
    "Seconds from the prefill's answer to the last notice that its KV is ready; 0 if all came before",
    Label("result", (("ready", "all ranks sent one"), ("timeout", "some did not before deadlines.kv_ready"))),
)
TOKENIZE = _histogram("pdproxy_tokenize_seconds", "Seconds to get the token ids of a prompt, or to fail", _SOURCE)

INFLIGHT = _gauge("pdproxy_inflight", "requests", "Requests that have a place and have not ended")
QUEUE = _gauge("pdproxy_queue", "requests", "Requests that wait for a place")
BODY_READERS = _gauge(
    "pdproxy_body_readers",
    "processes",
    "Reader processes, and large bodies that wait for one, by state",
    Label("state", (("busy", "processes at work"), ("idle", "free ones"), ("awaited", "bodies that wait for one"))),
)
TASKS = _gauge("pdproxy_tasks", "tasks", "Tasks of the event loop: those of requests, and those in the background")
CONNECTIONS = _gauge("pdproxy_connections", "connections", "Open connections of clients, also those being refused")
HELD_BYTES = _gauge(
    "pdproxy_held_bytes",
    "bytes",
    "Bytes that are held for clients and engines",
    Label(
        "what",
        (
            ("bodies", "of requests (limits.max_buffered_bytes)"),
            ("answers", "on their way from engines (limits.max_buffered_answer_bytes)"),
            ("unread", "what was written and clients have not read yet (limits.max_buffered_answer_bytes)"),
            ("records", "of streams, so that other engines can go on with them (continuations.max_bytes)"),
        ),
    ),
)
NODE_INFLIGHT = _gauge("pdproxy_node_inflight", "legs", "Legs in flight on an engine", NODE, ROLE)
KV_MISSING = _gauge(
    "pdproxy_kv_missing_tokens",
    "tokens",
    "Prompt tokens that never arrived by KV transfer since the decode engine's start",
    NODE,
)
KV_HANDLES = _gauge(
    "pdproxy_kv_handles", "handles", "KV handles that have not ended, by state", Label("state", _STATES)
)
KV_HANDLE_AGE = _gauge(
    "pdproxy_kv_handle_age_seconds", "seconds", "Age of the oldest KV handle in a state", Label("state", _STATES)
)
KV_STUCK = _gauge(
    "pdproxy_kv_stuck",
    "requests",
    "Requests of a decode engine that may wait for KV that will not come, and keep their blocks. An upper bound",
    NODE,
)
KV_STUCK_AGE = _gauge("pdproxy_kv_stuck_age_seconds", "seconds", "Age of the oldest of pdproxy_kv_stuck", NODE)
KV_READY_WAITS = _gauge("pdproxy_kv_ready_waits", "prompts", "Prompts whose notices are expected")
KV_NOTICES_KEPT = _gauge("pdproxy_kv_notices_kept", "notices", "Notices that nobody has waited for yet")
KV_BUFFER_SLOTS = _gauge(
    "pdproxy_kv_buffer_slots", "chunks", "Chunks of KV that may be in a decode engine's receive buffer", NODE
)
TOKENIZE_AGREES = _gauge(
    "pdproxy_tokenize_agrees",
    "bool",
    "Whether prompts may become token ids here, as the engine would make them",
    NODE,
    Label("model", text="a model of the engine"),
)
STATE = _gauge(
    "pdproxy_state",
    "bool",
    "1 for the state that /ready reports, 0 for the others",
    Label(
        "state",
        (
            ("ok", "requests are served, and prompts can be split"),
            ("degraded", "requests are served, and no prompt can be split"),
            ("not_ready", "no request can be served"),
        ),
    ),
)
BUILD_INFO = _gauge(
    "pdproxy_build_info",
    "bool",
    "Always 1; the labels are the versions of pdproxy and Python, and the connector",
    Label("version", text="pdproxy's version"),
    Label("python", text="Python's version"),
    Label("connector", text="the pool's connector"),
)

_FILES = (
    catalog_continuations,
    catalog_decisions,
    catalog_fleet,
    catalog_health,
    catalog_kv_events,
    catalog_peers,
    catalog_prefixes,
    catalog_refusals,
    catalog_turns,
    catalog_workers,
)
_OTHERS = [value for one in _FILES for value in vars(one).values()]
METRICS: tuple[Description, ...] = tuple(
    sorted(
        (found for found in [*vars().values(), *_OTHERS] if isinstance(found, Description)),
        key=lambda one: one.name,
    )
)
"""All of them, by name."""
