"""The rows of the table of metrics (`observe.catalog`) about engines' KV events. Only data."""

from __future__ import annotations

from pdproxy.observe.description import NODE, Description, Kind, Label


def _counter(name: str, unit: str, text: str, *labels: Label) -> Description:
    return Description(name, Kind.COUNTER, text, unit, labels)


def _gauge(name: str, unit: str, text: str, *labels: Label) -> Description:
    return Description(name, Kind.GAUGE, text, unit, labels)


RESULTS = (
    ("live", "taken as it was published"),
    ("replayed", "taken from a replay"),
    ("repeated", "a replay had brought it before"),
    ("stale", "it belongs to a run of the engine that is over"),
    ("dropped", "there was no space for it; it is asked for again"),
)
CAUSES = (
    ("lost", "messages are missing before it"),
    ("restart", "it belongs to another run of the engine"),
)
REPLAYS = (
    ("complete", "all that was missing has come"),
    ("too_old", "the engine does not keep that much: what is known of it begins later"),
    ("unanswered", "no answer in deadlines.kv_replay: all of the engine was forgotten"),
    ("incomplete", "messages are still missing: all of the engine was forgotten"),
    ("failed", "what came was no answer, or the address can't be used: all of the engine was forgotten"),
    ("unavailable", "the engine has no replay_endpoint, or replays have just failed: all of it was forgotten"),
)
SKIPPED = (
    ("undecodable", "a message or an event that can't be read"),
    ("unknown_event", "an event of a type that pdproxy does not know"),
    ("unknown_field", "a field that pdproxy does not know; the event was taken"),
    ("inconsistent", "the numbers of blocks and tokens do not agree"),
    ("unknown_topic", "a message of a topic that is no engine's"),
    ("not_passed", "a message that did not reach all workers, for too much waited: they ask the engine for it"),
)

KV_EVENT_MESSAGES = _counter(
    "pdproxy_kv_event_messages_total",
    "messages",
    "Messages with KV events of engines",
    NODE,
    Label("result", RESULTS),
)
KV_EVENT_BLOCKS = _counter(
    "pdproxy_kv_event_blocks_total",
    "blocks",
    "Blocks that engines have reported",
    Label(
        "change",
        (
            ("stored", "in a cache now, or announced again"),
            ("removed", "evicted"),
            ("cleared", "counts caches that were emptied, not blocks"),
        ),
    ),
)
KV_EVENTS_SKIPPED = _counter(
    "pdproxy_kv_events_skipped_total", "events", "What was skipped of KV events", Label("reason", SKIPPED)
)
KV_EVENT_GAPS = _counter(
    "pdproxy_kv_event_gaps_total",
    "gaps",
    "Messages with KV events that do not follow the one before",
    NODE,
    Label("cause", CAUSES),
)
KV_EVENT_REPLAYS = _counter(
    "pdproxy_kv_event_replays_total",
    "replays",
    "Requests to engines for messages that were published before, at the start and after gaps",
    Label("result", REPLAYS),
)

KV_EVENT_SOURCES = _gauge(
    "pdproxy_kv_event_sources",
    "sources",
    "Data-parallel ranks of engines whose KV events are read",
    Label("state", (("connected", "there is a connection"), ("not_connected", "there is none"))),
)
KV_EVENT_AGE = _gauge(
    "pdproxy_kv_event_age_seconds",
    "seconds",
    "Time since the last message of an engine's ranks, once there was one. An idle engine sends none",
    NODE,
)
KV_EVENT_BACKLOG = _gauge(
    "pdproxy_kv_event_backlog_bytes", "bytes", "KV events that were received and are not indexed yet"
)
