"""The dashboard of decisions: whole or split, on which engines, and how good predictions were."""

from __future__ import annotations

from pdproxy.app.gauges import KEPT_FOR_PREFILL, PREDICTION_ERRORS, TIME_CORRECTIONS
from pdproxy.app.prefixes import PREFIX_PREDICTIONS, PREFIX_TOKENS
from pdproxy.deciding.local_scheduler import DECISIONS
from pdproxy.deciding.retry_budget import RETRIES, RETRIES_REFUSED
from pdproxy.fleet.gauges import NODE_INFLIGHT
from pdproxy.observe.events import ALONES
from pdproxy.observe.prompt_shares import PROMPT_TOKENS
from tests.reference.panels import OF_BOARD as OF
from tests.reference.panels import Board, Kind, Panel

_AUTO = "a placement (policy.placement: auto)"
SPLIT = [
    Panel(
        "How prompts are served",
        "The parts of the prompt tokens. beside_idle: by a decode engine alone, while a prefill "
        "engine had no request. More than a third of that is a problem, and GET /ready says so.",
        [
            (
                OF.rate(PROMPT_TOKENS).sum("served").over(OF.rate(PROMPT_TOKENS).sum()),
                "{served}",
            )
        ],
        Kind.STACK,
    ),
    Panel(
        "Why one engine serves a prompt",
        "Prompts that were given to one engine alone. decided: the placement chose so. no_pair, "
        "prefill_failed, no_handle, kv_failed and kv_late are failures; most others are of the "
        "request.",
        [(OF.rate(ALONES).sum("reason"), "{reason}")],
        Kind.STACK,
    ),
    Panel(
        "Tokens beside idle prefill engines",
        "Why decode engines computed whole prompts while a prefill engine had no request.",
        [(OF.rate(PROMPT_TOKENS, {"served": "beside_idle"}).sum("reason"), "{reason}")],
        Kind.STACK,
    ),
]
PLACEMENT = [
    Panel(
        "Decisions",
        "split: a prefill and a decode engine. whole: one engine. refused: no engine can serve it "
        "in time (policy.refuse_late). A request has a decision for each attempt.",
        [(OF.rate(DECISIONS).sum("choice"), "{choice}")],
        Kind.STACK,
        needs=_AUTO,
    ),
    Panel(
        "Reasons of decisions",
        "The reason of the placement, as in the access line's field decision.",
        [(OF.rate(DECISIONS).sum("choice", "reason"), "{choice}: {reason}")],
        needs=_AUTO,
    ),
    Panel(
        "Engines kept for prefill",
        "Engines of role any that are kept for prefill at present.",
        [(OF.now(KEPT_FOR_PREFILL).max("instance"), "{instance}")],
        needs=_AUTO,
    ),
    Panel(
        "How wrong predictions were",
        "(measured - predicted) / predicted, of the last requests. mean below 0: answers came "
        "earlier. size: the mean size, either way.",
        [(OF.now(PREDICTION_ERRORS).max("of", "way", "kind"), "{of} {way} {kind}")],
        needs=f"{_AUTO}, and answers that were measured",
    ),
    Panel(
        "Corrections of engines' times",
        "What the times of an engine's profile are multiplied by, since its answers took longer "
        "or shorter. Far from 100 %: the profile is of another engine.",
        [(OF.now(TIME_CORRECTIONS).max("node", "work"), "{node} {work}")],
        needs=f"{_AUTO}, and answers that were measured",
    ),
    Panel(
        "Legs in flight by role",
        "Requests that the engines of each role have from these proxies.",
        [(OF.now(NODE_INFLIGHT).sum("role"), "{role}")],
    ),
]
PREFIXES = [
    Panel(
        "Predictions of cached prefixes",
        "Answers by how right the expectation was of what the engine had in its cache. Stays 0 "
        "unless engines run with --enable-prompt-tokens-details and policy prefix or a placement "
        "is used.",
        [(OF.rate(PREFIX_PREDICTIONS).sum("basis", "result"), "{basis} {result}")],
        Kind.STACK,
    ),
    Panel(
        "Tokens of cached prefixes",
        "predicted: expected in the cache. reported: found there. over and under: the differences. "
        "Stays 0 as above.",
        [(OF.rate(PREFIX_TOKENS).sum("what"), "{what}")],
    ),
    Panel(
        "Requests that are tried again",
        "Requests whose engine failed before its data. waiting: too many are tried again at once.",
        [(OF.now(RETRIES).sum("state"), "{state}")],
    ),
    Panel(
        "Requests that were not tried again",
        "Too many others were being tried again for deadlines.retry.",
        [(OF.rate(RETRIES_REFUSED).sum(), "refused")],
    ),
]
BOARD = Board(
    "decisions",
    "decisions",
    "Which prompts are split and why, what the placement decides, and how good its predictions "
    "are.",
    [
        ("Split or not", SPLIT),
        ("The placement", PLACEMENT),
        ("Cached prefixes, and requests that are tried again", PREFIXES),
    ],
)
