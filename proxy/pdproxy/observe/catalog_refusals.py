"""The rows of the table of metrics (`observe.catalog`) about requests that are refused, and about what bounds them. Only data."""

from __future__ import annotations

from pdproxy.kit.errors import Reason
from pdproxy.observe.description import NODE, Description, Kind, Label

REFUSED = (
    ("no_key", "no API key was sent, and one is required"),
    ("wrong_key", "the API key is none of the valid ones"),
    ("ended_key", "the API key has expired, or was taken away while the request was read"),
    ("not_allowed", "the API key is not good for that route or tenant, or a page of another site asks the admin API"),
    ("certificate", "the client's certificate is not valid any more"),
    ("connections", "too many connections are open"),
    ("body_too_large", "the body is larger than limits.max_body_bytes"),
    ("body_slow", "the body was not complete in deadlines.client_body"),
    ("no_space", "no space for the body: limits.max_buffered_bytes"),
    ("head_too_large", "the head is larger than limits.max_header_bytes"),
    ("head_slow", "the head was not complete in deadlines.client_head"),
    ("path_too_long", "the path is longer than that of any route"),
    ("bad_http", "what came is not a valid HTTP request"),
)
_OURS, _CLIENTS = "503", "429"
REASONS = (
    (Reason.KEY_REQUESTS, _CLIENTS, "its key has sent as many requests as it may per minute (rpm)"),
    (Reason.KEY_TOKENS, _CLIENTS, "its key has too few tokens left of those that it may use per minute (tpm)"),
    (Reason.KEY_INFLIGHT, _CLIENTS, "as many requests of its key are being served as may be (inflight)"),
    (Reason.WRONG_KEYS, _CLIENTS, "its address has sent too many wrong keys"),
    (Reason.SHARE, _CLIENTS, "the queue was full, and its client had the most requests in it"),
    (Reason.QUEUE_FULL, _OURS, "limits.max_queue requests wait"),
    (Reason.QUEUE_TIMEOUT, _OURS, "no place came free in deadlines.queue"),
    (Reason.DEADLINE, _OURS, "it can't be served within its X-Request-Timeout"),
    (Reason.CAPACITY, _OURS, "no decode engine had space for the prompt's KV in deadlines.queue"),
    (Reason.RETRY_BUDGET, _OURS, "its engine has failed, and no place to try it again came free in deadlines.retry"),
    (Reason.OBJECTIVE, _OURS, "no engine can serve it in time (policy.refuse_late)"),
    (Reason.NO_ENGINE, _OURS, "no engine that can serve it is up"),
    (Reason.ALONE, _OURS, "it can't be split, and pools[].alone lets no decode engine serve it whole"),
    (Reason.ENGINES_LOST, _OURS, "engines disappeared under it, and it may be the cause"),
    (Reason.DRAINING, _OURS, "pdproxy is shutting down"),
    (Reason.BODIES, _OURS, "no space for the body: limits.max_buffered_bytes"),
    (Reason.READERS, _OURS, "too many large bodies are being read, or it was not read in deadlines.read_body"),
    (Reason.ANSWERS, _OURS, "no space for an engine's answer: limits.max_buffered_answer_bytes"),
    (Reason.SLOW_READER, _OURS, "its client reads too slowly and holds more than its share, while others wait"),
    (Reason.CONNECTIONS, _OURS, "limits.max_connections are open"),
    (Reason.OPEN_FILES, _OURS, "the process may open no more files (ulimit -n)"),
)
"""Each reason with its status and its meaning."""
STATUS_OF = {reason.value: status for reason, status, _ in REASONS}

EARLY_REFUSALS = Description(
    "pdproxy_early_refusals_total",
    Kind.COUNTER,
    "Requests and connections that were refused before their body was complete, and requests without a valid key",
    "refusals",
    (Label("reason", REFUSED),),
)
WRONG_KEYS = Description(
    "pdproxy_wrong_keys_total",
    Kind.COUNTER,
    "Requests with a wrong key, of clients and of operators",
    "requests",
    (
        Label("listener", (("clients", "where clients reach the proxy"), ("admin", "listen.admin"))),
        Label(
            "answer",
            (("refused", "with 401"), ("throttled", "with 429: its address had sent too many before")),
        ),
    ),
)
CAPACITY = Description(
    "pdproxy_capacity",
    Kind.GAUGE,
    "Requests that an engine can take now (limits.engine_requests). Engines without such a bound are not shown",
    "requests",
    (NODE,),
)
PLACES = Description(
    "pdproxy_places",
    Kind.GAUGE,
    "Requests that may be served at once now: by limits.max_inflight, by what engines can take, and by clients' deadlines",
    "requests",
)
TENANT_TOKENS = Description(
    "pdproxy_tenant_tokens_total",
    Kind.COUNTER,
    "Tokens of prompts and answers by tenant, of requests that have ended: counted as pdproxy_tokens_total",
    "tokens",
    (
        Label(
            "tenant",
            text='a name of the file of keys or of overload.weights; "other" for other names in overload.tenant_header',
        ),
    ),
)
TOKENS_IN_FLIGHT = Description(
    "pdproxy_tokens_in_flight",
    Kind.GAUGE,
    "Tokens of the requests that have a place: prompts and expected answers, as estimated before (limits.max_inflight_tokens)",
    "tokens",
)
REFUSALS = Description(
    "pdproxy_refusals_total",
    Kind.COUNTER,
    "Requests and connections that were refused now and may succeed later, by the reason in the error's body",
    "refusals",
    (
        Label("reason", tuple((reason.value, text) for reason, _, text in REASONS)),
        Label("status", ((_CLIENTS, "the client's own limit or share"), (_OURS, "what all clients share"))),
    ),
    together=tuple(STATUS_OF.items()),
)
