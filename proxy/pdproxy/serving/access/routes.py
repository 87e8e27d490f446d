"""The table of routes: every path that clients can reach, and what is done with it. Only data.

All other paths get a 404 from the proxy: engines have routes that put them to sleep, load weights
or run code. `docs/reference/routes.md` documents the table; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdproxy.wire.api_errors import Dialect

MODELS = "/v1/models"
REALTIME = "/v1/realtime"
_KEY_ROUTES = {
    "/v1/chat/completions": "chat",
    "/cohere/v2/chat": "cohere",
    "/v1/responses/{response_id}": "responses",
    "/v1/responses/{response_id}/cancel": "responses",
}
"""Names of routes in lines of keys that are not the last part of a path."""


class RouteKind(Enum):
    """What is done with a request."""

    SPLIT = "split"  # prefill and decode apart: the data path
    PASSED = "passed"  # whole to one engine that serves the model alone
    WEBSOCKET = "websocket"  # both directions between a client and one engine
    OWN = "own"  # answered by pdproxy
    REFUSED = "refused"  # a 404 that states why it can't work


class Audience(Enum):
    """Whom a route is for."""

    CLIENTS = "clients"  # with a key, where keys are set
    CHECKS = "health checks"  # everybody; details in their answers are for operators
    OPERATORS = "operators"  # as `listen.operator_routes` says


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """One path. `why`: its purpose, or why it is refused. `slow`: the model generates, so only
    `deadlines.total` bounds it. `form`: its bodies are multipart/form-data, with audio.
    """

    path: str
    methods: tuple[str, ...]
    kind: RouteKind
    why: str
    dialect: Dialect = Dialect.OPENAI
    slow: bool = True
    audience: Audience = Audience.CLIENTS
    form: bool = False

    @property
    def key_route(self) -> str:
        """The name of the route in lines of keys (`routes=`): paths of one purpose share it."""
        return _KEY_ROUTES.get(self.path) or self.path.rpartition("/")[2]

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key, where clients have keys."""
        return self.kind is not RouteKind.OWN or self.path == MODELS

    @property
    def computes(self) -> bool:
        """Whether an engine computes prompts for it, with what its prefix cache has of them."""
        return self.slow and self.has_body

    @property
    def has_body(self) -> bool:
        """Whether requests have a body."""
        return "POST" in self.methods


def _split(path: str, why: str, dialect: Dialect = Dialect.OPENAI) -> RouteEntry:
    return RouteEntry(path, ("POST",), RouteKind.SPLIT, why, dialect)


def _passed(
    path: str, why: str, dialect: Dialect = Dialect.OPENAI, *, slow: bool = True
) -> RouteEntry:
    return RouteEntry(path, ("POST",), RouteKind.PASSED, why, dialect, slow)


def _spoken(path: str, why: str) -> RouteEntry:
    return RouteEntry(path, ("POST",), RouteKind.PASSED, why, form=True)


def _shown(
    path: str, audience: Audience, why: str, methods: tuple[str, ...] = ("GET",)
) -> RouteEntry:
    return RouteEntry(path, methods, RouteKind.OWN, why, audience=audience)


TABLE: tuple[RouteEntry, ...] = (
    _split("/v1/completions", "complete prompts"),
    _split("/v1/chat/completions", "answer chats"),
    _split("/v1/chat/completions/batch", "answer several chats, each as one of a list of prompts"),
    _split("/invocations", "SageMaker's route for chats, completions and all that is pooled"),
    _split("/v1/responses", "OpenAI's Responses API, without memory", Dialect.RESPONSES),
    RouteEntry("/v1/responses/{response_id}", ("GET",), RouteKind.REFUSED, "no response is stored"),
    RouteEntry(
        "/v1/responses/{response_id}/cancel",
        ("POST",),
        RouteKind.REFUSED,
        "no response runs in the background",
    ),
    _split("/v1/messages", "Anthropic's Messages API", Dialect.MESSAGES),
    _split("/inference/v1/generate", "token ids to token ids, where engines' flag allows it"),
    _split("/cohere/v2/chat", "Cohere's chat, where engines have it", Dialect.COHERE),
    _passed("/v1/messages/count_tokens", "count a message's tokens", Dialect.MESSAGES, slow=False),
    _passed("/tokenize", "token ids of a prompt or a chat", slow=False),
    _passed("/detokenize", "text of token ids", slow=False),
    RouteEntry(
        "/tokenizer_info",
        ("GET",),
        RouteKind.PASSED,
        "an engine's tokenizer, where its flag allows it",
        slow=False,
    ),
    _passed("/generative_scoring", "score texts by the next token of a generating model"),
    _passed(
        "/v1/decisions", "OpenAI's Decisions API: answers to questions, each with its probability"
    ),
    _passed("/v1/systemone", "the same in vLLM's own form"),
    _spoken("/v1/audio/transcriptions", "write down what is said"),
    _spoken("/v1/audio/translations", "the same in English, or in another language"),
    RouteEntry(REALTIME, ("GET",), RouteKind.WEBSOCKET, "write down live what is said"),
    _passed("/v1/embeddings", "embed texts"),
    _passed("/pooling", "what a pooling model makes of texts"),
    _passed("/classify", "classify texts"),
    _passed("/score", "score pairs of texts"),
    _passed("/v1/score", "score pairs of texts"),
    _passed("/rerank", "rank documents for a query"),
    _passed("/v1/rerank", "rank documents for a query"),
    _passed("/v2/rerank", "rank documents for a query"),
    RouteEntry(MODELS, ("GET",), RouteKind.OWN, "the models that the engines serve, each once"),
    _shown("/health", Audience.CHECKS, "whether the process runs"),
    _shown("/ping", Audience.CHECKS, "as /health, under SageMaker's name", ("GET", "POST")),
    _shown(
        "/ready", Audience.CHECKS, "whether a request could be served, and for operators why not"
    ),
    _shown(
        "/ready/proxy",
        Audience.CHECKS,
        "whether this proxy takes requests, whatever its engines do: for balancers",
    ),
    _shown(
        "/drained",
        Audience.CHECKS,
        "whether nothing is left at an engine that is to end, and for operators what: for its"
        " preStop hook",
    ),
    _shown(
        "/healthcheck",
        Audience.CHECKS,
        "as vLLM's demo proxies: that the process runs, and for operators its engines by role",
    ),
    _shown("/load", Audience.OPERATORS, "the number of requests in flight"),
    _shown("/version", Audience.OPERATORS, "pdproxy's version"),
    _shown("/metrics", Audience.OPERATORS, "Prometheus metrics"),
    _shown("/docs", Audience.OPERATORS, "this table in a browser, with its files below /docs/"),
    _shown("/openapi.json", Audience.OPERATORS, "the document that /docs shows"),
)
ENTRIES = {entry.path: entry for entry in TABLE}
"""The table by path."""
KEY_ROUTES = frozenset(
    entry.key_route
    for entry in TABLE
    if entry.kind in (RouteKind.SPLIT, RouteKind.PASSED, RouteKind.WEBSOCKET)
)
"""What lines of keys may name. Each key may list the models that it is good for."""


def audience_of(path: str) -> Audience | None:
    """Return whom a route is for, None if the table does not have it."""
    entry = ENTRIES.get("/docs" if path.startswith("/docs/") else path)
    return None if entry is None else entry.audience
