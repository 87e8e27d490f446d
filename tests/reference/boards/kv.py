"""The dashboard of KV: does it move, is it freed, and what is known of engines' caches."""

from __future__ import annotations

from pdproxy.app.prefixes import PREFIX_BLOCKS
from pdproxy.deciding.buffers import KV_BUFFER_SLOTS
from pdproxy.deciding.turns import TURN_BLOCKS, TURN_TOKENS, TURNS, TURNS_DROPPED
from pdproxy.fleet.audit import KV_MISSING, KV_MOVED, PAIRS_EJECTED
from pdproxy.fleet.kv_sources import (
    KV_EVENT_AGE,
    KV_EVENT_BACKLOG,
    KV_EVENT_BLOCKS,
    KV_EVENT_GAPS,
    KV_EVENT_SOURCES,
)
from pdproxy.fleet.transfers import TRANSFER_FAULTS, TRANSFER_FAULTS_FOUND
from pdproxy.observe.requests import PHASE
from pdproxy.serving.kv.custodian import (
    HANDLES_ENDED,
    KV_BYTES,
    KV_HANDLE_AGE,
    KV_HANDLES,
    KV_SECONDS,
    KV_STUCK,
    KV_STUCK_AGE,
)
from pdproxy.serving.kv.ready import KV_NOTICES, SILENT_RANKS
from tests.reference.panels import OF_BOARD as OF
from tests.reference.panels import Board, Kind, Panel

_NOTIFIER = "the notifier on the engines (pdproxy notifier)"
_EVENTS = "KV events of the engines (pools[].kv_events.enabled)"
_STUCK = "a prefill that failed with a connector whose legs run at once (nixl-push, mooncake)"
_TURNS = "turns that hand KV back (pools[].turns.bidirectional)"
MOVES = [
    Panel(
        "Prompt tokens that moved",
        "By the decode engines' own counters. recomputed: the KV was sent and did not arrive, so "
        "that the decode engine computed the prompt again. Clients do not notice that.",
        [(OF.rate(KV_MOVED).sum("result"), "{result}")],
        Kind.STACK,
    ),
    Panel(
        "Tokens that never arrived",
        "Of each decode engine since its start. Any growth: GET /ready names the engine.",
        [(OF.now(KV_MISSING).max("node"), "{node}")],
    ),
    Panel(
        "Where KV does not move",
        "Engines and links with which no prompt is split now. prefill: nobody can load its KV. "
        "decode: it can load no KV. link: only this pair. GET /ready names them.",
        [(OF.now(TRANSFER_FAULTS).sum("kind"), "{kind}")],
    ),
    Panel(
        "How often KV was found not to move",
        "In the last hour.",
        [(OF.increase(TRANSFER_FAULTS_FOUND, "1h").sum("kind"), "{kind}")],
    ),
    Panel(
        "Pairs that were ejected",
        "Prefill and decode engines that counted different lengths of one prompt, in the last "
        "hour. Such a pair stays out until an engine is restarted.",
        [(OF.increase(PAIRS_EJECTED, "1h").sum(), "pairs")],
    ),
    Panel(
        "Time to the decode engine's first data",
        "Its queue, the KV transfer and one step: what is known of transfers without the notifier.",
        [
            (OF.quantile(part, PHASE, where={"phase": "kv"}), f"p{part * 100:g}")
            for part in (0.5, 0.95, 0.99)
        ],
    ),
    Panel(
        "Time of transfers",
        "As the decode engines report it.",
        [(OF.quantile(part, KV_SECONDS), f"p{part * 100:g}") for part in (0.5, 0.95, 0.99)],
        needs=_NOTIFIER,
    ),
    Panel(
        "Bytes of transfers",
        f"As the decode engines report them. Stays 0 without {_NOTIFIER}.",
        [(OF.rate(KV_BYTES).sum(), "loaded")],
    ),
]
HANDLES = [
    Panel(
        "Handles",
        "KV that waits in prefill engines. held: no decode engine was asked. asked: a decode "
        "engine has the handle and has shown nothing yet. releasing: it is being freed. promised: "
        "both engines were asked at once.",
        [(OF.now(KV_HANDLES).sum("state"), "{state}")],
        Kind.STACK,
    ),
    Panel(
        "Age of the oldest handle",
        "An engine frees KV by itself after its lease: 30 s by default with vLLM's newer releases. "
        "KV that is older than that is lost.",
        [(OF.now(KV_HANDLE_AGE).max("state"), "{state}")],
    ),
    Panel(
        "How handles ended",
        "loaded, released, refused and aborted are good ends. lost and expired: the engine frees "
        "the KV after its own time. stuck: the decode engine may wait for it.",
        [(OF.rate(HANDLES_ENDED).sum("end"), "{end}")],
        Kind.STACK,
    ),
    Panel(
        "Requests that may wait for KV for ever",
        "An upper bound, of each decode engine. They keep their blocks until the engine restarts.",
        [(OF.now(KV_STUCK).sum("node"), "{node}")],
        needs=_STUCK,
    ),
    Panel(
        "Age of the oldest of these",
        "Of each decode engine.",
        [(OF.now(KV_STUCK_AGE).max("node"), "{node}")],
        needs=_STUCK,
    ),
    Panel(
        "Notices",
        f"What pdproxy did with the engines' notices. Stays 0 without {_NOTIFIER} or LMCache's PD "
        "mode.",
        [(OF.rate(KV_NOTICES).sum("event", "result"), "{event} {result}")],
    ),
    Panel(
        "Ranks that sent no notice",
        "Notices that did not come before deadlines.kv_ready, by the rank that did not send one.",
        [(OF.rate(SILENT_RANKS).sum("node", "rank"), "{node} rank {rank}")],
        needs="a rank that has sent no notice since the proxy's start",
    ),
    Panel(
        "Chunks in receive buffers",
        "Chunks of KV that may be in a decode engine's receive buffer.",
        [(OF.now(KV_BUFFER_SLOTS).sum("node"), "{node}")],
        needs="LMCache's PD mode (lmcache.pd_buffer_size and lmcache.kv_bytes_per_token)",
    ),
]
CACHES = [
    Panel(
        "Blocks that are known of engines' caches",
        "events: by KV events. routing: by what was sent to engines. just_routed: by what was sent "
        "in the last seconds.",
        [(OF.now(PREFIX_BLOCKS).sum("from"), "{from}")],
        needs="policy.decode or policy.prefill prefix, or policy.placement auto",
    ),
    Panel(
        "Connections to KV events",
        "Data-parallel ranks whose KV events are read. not_connected above 0: what is known of "
        "that engine's cache is old.",
        [(OF.now(KV_EVENT_SOURCES).sum("state"), "{state}")],
        needs=_EVENTS,
    ),
    Panel(
        "Age of the last KV event",
        "Of each engine. An idle engine sends none.",
        [(OF.now(KV_EVENT_AGE).max("node"), "{node}")],
        needs=_EVENTS,
    ),
    Panel(
        "Blocks of KV events",
        "Blocks that engines report. Stays 0 without KV events (pools[].kv_events.enabled).",
        [(OF.rate(KV_EVENT_BLOCKS).sum("change"), "{change}")],
    ),
    Panel(
        "KV events that are missing",
        "Gaps in the engines' messages. lost: messages are missing. restart: the engine was "
        "started again.",
        [(OF.rate(KV_EVENT_GAPS).sum("node", "cause"), "{node} {cause}")],
        needs=_EVENTS,
    ),
    Panel(
        "KV events that are not indexed yet",
        "Grows: the proxy can't follow the engines.",
        [(OF.now(KV_EVENT_BACKLOG).sum(), "backlog")],
        needs=_EVENTS,
    ),
]
GIVEN_BACK = [
    Panel(
        "Turns that may be used",
        "Finished turns of conversations whose KV a decode engine keeps for the next prompt.",
        [(OF.now(TURNS).sum(), "turns")],
        needs=_TURNS,
    ),
    Panel(
        "Blocks of turns",
        "What the turns take of each decode engine's memory.",
        [(OF.now(TURN_BLOCKS).sum("node"), "{node}")],
        needs=_TURNS,
    ),
    Panel(
        "Prompt tokens that were not computed again",
        "Prompt tokens whose KV prefill engines were given by decode engines. Stays 0 without "
        f"{_TURNS}.",
        [(OF.rate(TURN_TOKENS).sum(), "tokens")],
    ),
    Panel(
        "Turns that were dropped",
        f"Turns whose KV will not be used, and why. Stays 0 without {_TURNS}.",
        [(OF.rate(TURNS_DROPPED).sum("reason"), "{reason}")],
        Kind.STACK,
    ),
]
BOARD = Board(
    "kv",
    "KV cache",
    "Does KV move between engines, is it freed, and what is known of the engines' caches.",
    [
        ("Transfers", MOVES),
        ("Handles", HANDLES),
        ("What is known of engines' caches", CACHES),
        ("KV that decode engines give back", GIVEN_BACK),
    ],
)
