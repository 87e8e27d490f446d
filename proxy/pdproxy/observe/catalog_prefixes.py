"""The rows of the table of metrics (`observe.catalog`) about engines' prefix caches. Only data."""

from __future__ import annotations

from pdproxy.observe.description import Description, Kind, Label

BASES = (
    ("events", "the engine's KV events"),
    ("routing", "the prompts that were sent to it"),
    ("text", "the text of prompts that were sent to it: an estimate"),
)
RESULTS = (
    ("exact", "the engine had found as much in its cache"),
    ("too_high", "it had found less"),
    ("too_low", "it had found more"),
)
TOKENS = (
    ("predicted", "expected in the cache"),
    ("reported", "found there"),
    ("over", "expected and not found"),
    ("under", "found and not expected"),
)
_BASIS = Label("basis", BASES)

PREFIX_PREDICTIONS = Description(
    "pdproxy_prefix_predictions_total",
    Kind.COUNTER,
    "Answers by how right the expectation was of what the engine had in its cache of the prompt (cached_tokens)",
    "answers",
    (_BASIS, Label("result", RESULTS)),
)
PREFIX_TOKENS = Description(
    "pdproxy_prefix_tokens_total",
    Kind.COUNTER,
    "Prompt tokens of these answers",
    "tokens",
    (_BASIS, Label("what", TOKENS)),
)
PREFIX_BLOCKS = Description(
    "pdproxy_prefix_blocks",
    Kind.GAUGE,
    "Blocks that are known of engines' prefix caches",
    "blocks",
    (
        Label(
            "from",
            (
                ("events", "of KV events (prefixes.max_blocks)"),
                ("routing", "of what was sent to engines without events, and of texts"),
                ("just_routed", "of what was sent in the last seconds (prefixes.ttl)"),
            ),
        ),
    ),
)
PREFIX_EVENT_BLOCKS = Description(
    "pdproxy_prefix_event_blocks_total",
    Kind.COUNTER,
    "Blocks of KV events by what became of them in the index",
    "blocks",
    (
        Label(
            "result",
            (
                ("stored", "entered"),
                ("removed", "taken out: evicted"),
                ("repeated", "known already"),
                ("unknown_parent", "not entered: the block before them is not known, for its message was lost"),
                ("unknown_block", "evicted, or stored without tokens, and not known"),
                ("odd", "not entered: their size does not fit prefixes.unit, or a token id is none"),
                ("not_counted", "of groups that say nothing about hits"),
                ("no_space", "not entered, or taken out, for prefixes.max_blocks"),
            ),
        ),
    ),
)
PREFIX_DISPROVED = Description(
    "pdproxy_prefix_disproved_total",
    Kind.COUNTER,
    "Beginnings that were dropped: an engine lacked what its events had said of them more than once",
    "prompts",
    (),
)
PREFIX_SKIPPED = Description(
    "pdproxy_prefix_skipped_total",
    Kind.COUNTER,
    "Prompts of which less is known because of a bound",
    "prompts",
    (
        Label(
            "reason",
            (
                ("busy", "64 long prompts were waiting for their keys already: no cache was searched for it"),
                (
                    "no_space",
                    "prompts of the last seconds have more keys than are kept: some do not count as just sent",
                ),
                ("not_shared", "other workers do not know of it: what they were told was too much"),
            ),
        ),
    ),
)
PREFIX_SHARED_AGE = Description(
    "pdproxy_prefix_shared_age_seconds",
    Kind.GAUGE,
    "How long it took until a worker knew of the last prompt that another worker had sent to an engine",
    "seconds",
    (),
)
PREFIX_REFRESHES = Description(
    "pdproxy_prefix_refreshes_total",
    Kind.COUNTER,
    "Requests that asked their engine to report the blocks that it reuses, since it had more in its cache than was known",
    "requests",
    (
        Label(
            "result",
            (
                ("asked", "sent with vllm_xargs"),
                ("refused", "answered 400; an engine that does so three times in a row gets no more"),
            ),
        ),
    ),
)
