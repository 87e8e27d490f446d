"""The rows of the table of metrics (`observe.catalog`) about turns whose KV is used for the next prompt. Only data."""

from __future__ import annotations

from pdproxy.observe.description import Description, Kind, Label

TURN_DROPS = (
    ("evicted", "a newer turn took its place (turns.max_kept, max_blocks, max_bytes)"),
    ("expired", "its time was over (turns.decoder_kv_blocks_ttl, less the margin)"),
    ("restarted", "its decode engine was started again or removed"),
    ("released", "its decode engine freed it"),
    ("leaving", "its decode engine is being drained"),
    ("too_long", "it alone is more than may be kept"),
    ("no_ids", "the token ids of the prompt are not known"),
    ("groups", "its model has several groups of layers, whose blocks can't be cut"),
    ("unusable", "what the decode engine sent of it is not a handle"),
    ("no_notice", "its stream has ended, and no notice has named its KV"),
    ("abandoned", "its answer was not complete: its client has left, or its stream has failed"),
    ("unused", "the prefill engine that was to get it could not be asked, or has refused the prompt"),
    ("failed", "the prefill engine that was given it has failed"),
    ("unanswered", "the prefill engine that was given it has not answered"),
    ("shutdown", "the proxy has stopped"),
    ("worker_ended", "the worker that kept it has ended"),
)


def _counter(name: str, unit: str, text: str, *labels: Label) -> Description:
    return Description(name, Kind.COUNTER, text, unit, labels)


def _gauge(name: str, unit: str, text: str, *labels: Label) -> Description:
    return Description(name, Kind.GAUGE, text, unit, labels)


TURNS_KEPT = _counter(
    "pdproxy_turns_kept_total",
    "turns",
    "Finished turns whose KV a decode engine keeps for the conversation's next prompt, with a handle that was kept here",
)
TURNS_REUSED = _counter(
    "pdproxy_turns_reused_total",
    "prompts",
    "Prompts that were prefilled with KV of the turn before",
    Label(
        "part", (("whole", "all that the decode engine kept"), ("trimmed", "the whole blocks that they have in common"))
    ),
)
TURNS_DROPPED = _counter(
    "pdproxy_turns_dropped_total", "turns", "Finished turns whose KV will not be used", Label("reason", TURN_DROPS)
)
TURN_TOKENS = _counter(
    "pdproxy_turn_tokens_reused_total",
    "tokens",
    "Prompt tokens whose KV prefill engines were given from decode engines. What they had in their own cache they did not pull",
)
TURN_SECONDS = _counter(
    "pdproxy_turn_prefill_seconds_saved_total",
    "seconds",
    "Prefill engines' seconds saved by these tokens, estimated: the tokens beyond the prompt that the same engine prefilled "
    "in the turn before, multiplied by its seconds per computed token. These are measured on its legs without such KV, queues "
    "included, with a weight of 0.95 from prompt to prompt",
)
TURN_CLAIMS = _counter(
    "pdproxy_turn_claims_total",
    "turns",
    "Questions of one worker to another for a turn that it keeps",
    Label(
        "result",
        (
            ("given", "the prompt uses it"),
            ("gone", "it was used or dropped meanwhile"),
            ("late", "the worker did not answer in time: it has ended, or is stopped"),
        ),
    ),
)
TURN_RELEASES = _counter(
    "pdproxy_turn_releases_total",
    "turns",
    "Releases of such KV that is not used",
    Label(
        "result",
        (
            ("released", "the decode engine has a report that nobody reads the KV"),
            ("left", "it has none: it frees the KV later"),
        ),
    ),
)

TURNS = _gauge("pdproxy_turns", "turns", "Finished turns whose KV may be used")
TURN_BLOCKS = _gauge(
    "pdproxy_turn_blocks",
    "blocks",
    "Blocks of these turns at a decode engine (turns.max_blocks)",
    Label("node", text="the engine's URL"),
)
TURN_BYTES = _gauge(
    "pdproxy_turn_bytes",
    "bytes",
    "Bytes of token ids and handles that are held (turns.max_bytes)",
    Label("of", (("kept", "turns that may be used"), ("open", "turns whose answer or notice has not come"))),
)
