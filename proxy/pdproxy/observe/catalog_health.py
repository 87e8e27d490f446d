"""The rows of the table of metrics (`observe.catalog`) about engines that come, go or stand still, and retries. Only data."""

from __future__ import annotations

from pdproxy.observe.description import NODE, Description, Kind, Label

NODE_UP = Description(
    "pdproxy_node_up",
    Kind.GAUGE,
    "Whether an engine may be used: probes find it up, it does not stand still, and its breaker is closed",
    "bool",
    (NODE, Label("role", text="prefill, decode, aggregated or any")),
)
NODE_STATE = Description(
    "pdproxy_node_state",
    Kind.GAUGE,
    "1 for the state that an engine is in, 0 for the others",
    "bool",
    (
        NODE,
        Label(
            "state",
            (
                ("up", "it gets requests"),
                ("down", "probes find it down: it gets none"),
                ("draining", "it is to leave, or has been drained: it gets none"),
                ("stalled", "its core stands still (health.stalled_after): it gets none"),
                ("asleep", "it sleeps, as its vllm:engine_sleep_state says: it gets none"),
                ("excluded", "by its breaker, or as an outlier: it gets requests only if there is no other engine"),
                ("half_open", "it gets one request at a time, until one has shown that it serves again"),
                (
                    "kv_failing",
                    "KV does not move to or from it: no prompt is split with it, it may serve prompts whole",
                ),
                ("slow_start", "it gets more and more requests (health.slow_start)"),
            ),
        ),
    ),
)
STALLS = Description(
    "pdproxy_stalls_total", Kind.COUNTER, "How often an engine was found to stand still", "stalls", (NODE,)
)
CANARIES = Description(
    "pdproxy_canaries_total",
    Kind.COUNTER,
    "Requests for one token by which engines that were silent were asked whether they work",
    "requests",
    (
        NODE,
        Label(
            "result",
            (
                ("answered", "the engine works"),
                ("failed", "no answer in health.canary_timeout, or an error of the engine"),
                ("refused", "the engine serves no such requests, or has no place for one: this shows nothing"),
            ),
        ),
    ),
)
RETRIES = Description(
    "pdproxy_retries",
    Kind.GAUGE,
    "Requests whose engine failed before its data, and that are tried again (limits.retry_share)",
    "requests",
    (Label("state", (("running", "another engine was asked, and has sent no data yet"), ("waiting", "too many run"))),),
)
RETRIES_REFUSED = Description(
    "pdproxy_retries_refused_total",
    Kind.COUNTER,
    "Requests that were not tried again since too many were for deadlines.retry",
    "requests",
)
ENGINES_LOST = Description(
    "pdproxy_engines_lost_total",
    Kind.COUNTER,
    "Engines that disappeared under a request, once for each request that was under way there",
    "engines",
    (Label("requests", (("one", "no other request was under way there"), ("several", "others were, too"))),),
)
SUSPECTED = Description(
    "pdproxy_suspected",
    Kind.GAUGE,
    "What is remembered since engines disappeared under it alone, time and again",
    "entries",
    (
        Label(
            "what",
            (
                ("one_engine", "requests with two such engines: each gets one engine when it comes again"),
                ("refused", "requests with three or more: they are refused"),
                ("client", "clients with three or more: few of their requests run at a time"),
            ),
        ),
    ),
)
WAITING_FOR_ENGINES = Description(
    "pdproxy_waiting_for_engines",
    Kind.GAUGE,
    "Requests that wait for an engine that stands still, because no other can serve them (deadlines.queue)",
    "requests",
)
_FAULT = Label(
    "kind",
    (
        ("prefill", "no decode engine can load a prefill engine's KV, or it makes none"),
        ("decode", "a decode engine can load no KV, or computes it again"),
        ("link", "KV does not get from one prefill engine to one decode engine, which both move KV with others"),
    ),
)
TRANSFER_FAULTS = Description(
    "pdproxy_kv_faults",
    Kind.GAUGE,
    "Engines and links with which no prompt is split since KV does not move; GET /ready names them",
    "faults",
    (_FAULT,),
)
TRANSFER_FAULTS_FOUND = Description(
    "pdproxy_kv_faults_found_total",
    Kind.COUNTER,
    "How often it was found that KV does not move to or from an engine, or over a link",
    "faults",
    (_FAULT,),
)
EXCLUSIONS = Description(
    "pdproxy_exclusions_total",
    Kind.COUNTER,
    "How often an engine was excluded as an outlier (outliers)",
    "exclusions",
    (
        NODE,
        Label(
            "reason",
            (("errors", "it failed more often than its peers"), ("latency", "it was slower than its peers")),
        ),
    ),
)
