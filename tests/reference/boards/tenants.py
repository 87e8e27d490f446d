"""The dashboard of clients: what tenants use, what their keys are refused, and who holds too
much.
"""

from __future__ import annotations

from pdproxy.app.gauges import CONNECTIONS, HELD_BYTES, REFUSALS_NOT_LOGGED
from pdproxy.deciding.engines_lost import SUSPECTED
from pdproxy.deciding.local_admission import QUEUE, TOKENS_IN_FLIGHT
from pdproxy.observe.events import DEADLINES, EVICTIONS
from pdproxy.observe.requests import REFUSALS, REQUESTS, TENANT_TOKENS
from pdproxy.web.admin.gate import ADMIN_REQUESTS
from pdproxy.web.refusals import EARLY_REFUSALS
from pdproxy.web.websocket import WEBSOCKETS
from pdproxy.web.wrong_keys import WRONG_KEYS
from tests.reference.panels import OF_BOARD as OF
from tests.reference.panels import Board, Kind, Panel

_NAMES = "names of tenants (auth.api_keys_file with names, or overload.tenant_header)"
_KEYS = {"reason": ("no_key", "wrong_key", "ended_key", "not_allowed", "certificate")}
_OF_CLIENTS = ("client_head", "client_body", "client_write")
USE = [
    Panel(
        "Tokens of tenants",
        "Tokens of prompts and answers of the requests that have ended.",
        [(OF.rate(TENANT_TOKENS).sum("tenant"), "{tenant}")],
        Kind.STACK,
        needs=_NAMES,
        width=12,
    ),
    Panel(
        "Parts of tenants",
        "The part of the tokens that each tenant had. While requests wait, places are divided by "
        "the tenants' weights.",
        [
            (
                OF.rate(TENANT_TOKENS).sum("tenant").over(OF.rate(TENANT_TOKENS).sum()),
                "{tenant}",
            )
        ],
        Kind.STACK,
        needs=_NAMES,
        width=12,
    ),
    Panel(
        "Requests by route",
        "Requests that have ended.",
        [(OF.rate(REQUESTS).sum("endpoint"), "{endpoint}")],
        Kind.STACK,
    ),
    Panel(
        "Requests by model",
        "Models that an engine lists and that were served; other: all others.",
        [(OF.rate(REQUESTS).sum("model"), "{model}")],
        Kind.STACK,
    ),
    Panel(
        "Tokens in flight",
        "Tokens of the requests that have a place, as estimated before "
        "(limits.max_inflight_tokens).",
        [(OF.now(TOKENS_IN_FLIGHT).sum(), "tokens")],
    ),
]
KEYS = [
    Panel(
        "Refused for the client's own limit or share",
        "429, by reason. key_*: a limit of its key. share: its client had the most in a full "
        "queue. wrong_keys: its address has sent too many wrong keys.",
        [(OF.rate(REFUSALS, {"status": "429"}).sum("reason"), "{reason}")],
        Kind.STACK,
    ),
    Panel(
        "Refused for what all clients share",
        "503, by reason.",
        [(OF.rate(REFUSALS, {"status": "503"}).sum("reason"), "{reason}")],
        Kind.STACK,
    ),
    Panel(
        "Refused for the key",
        "no_key: none was sent. not_allowed: the key is not good for that route or tenant.",
        [(OF.rate(EARLY_REFUSALS, _KEYS).sum("reason"), "{reason}")],
        Kind.STACK,
    ),
    Panel(
        "Wrong keys",
        "throttled: the address had sent too many wrong keys before. The log names it.",
        [(OF.rate(WRONG_KEYS).sum("listener", "answer"), "{listener} {answer}")],
    ),
    Panel(
        "Requests to the admin API",
        "Stays 0 without listen.admin.",
        [(OF.rate(ADMIN_REQUESTS).sum("result"), "{result}")],
    ),
    Panel(
        "Refusals that were not logged",
        "Too many came at once, or of one client.",
        [(OF.rate(REFUSALS_NOT_LOGGED).sum(), "lines")],
    ),
]
HOLD = [
    Panel(
        "Taken from clients with more than their share",
        "While others waited. queue: a waiting request. body: one that was not complete. "
        "connection: an idle one. reader, answer: an answer that was read too slowly or not.",
        [(OF.rate(EVICTIONS).sum("what"), "{what}")],
        Kind.STACK,
    ),
    Panel(
        "Clients that are too slow",
        "Waits for clients that ended by their deadline: for a head, for a body, for reading an "
        "answer.",
        [(OF.rate(DEADLINES, {"wait": _OF_CLIENTS}).sum("wait"), "{wait}")],
        Kind.STACK,
    ),
    Panel(
        "Bytes that are held",
        "bodies: of requests. answers: on their way from engines. unread: what clients have not "
        "read yet. records: of streams, so that other engines can go on with them.",
        [(OF.now(HELD_BYTES).sum("what"), "{what}")],
        Kind.STACK,
    ),
    Panel(
        "Connections",
        "Open connections of clients.",
        [(OF.now(CONNECTIONS).sum(), "connections")],
    ),
    Panel(
        "WebSockets",
        "Open WebSockets of clients.",
        [(OF.now(WEBSOCKETS).sum(), "WebSockets")],
    ),
    Panel(
        "Under suspicion",
        "Requests and clients under which engines disappeared. refused: such requests are "
        "refused. client: few of the client's requests run at a time.",
        [(OF.now(SUSPECTED).sum("what"), "{what}")],
    ),
    Panel(
        "Requests that wait",
        "For a place. Who is next depends on the tenants' weights.",
        [(OF.now(QUEUE).sum(), "waiting")],
    ),
]
BOARD = Board(
    "tenants",
    "tenants and keys",
    "What tenants use, what clients are refused, and which clients hold too much.",
    [("Use", USE), ("Keys and limits", KEYS), ("Clients that hold too much", HOLD)],
)
