"""The table of routes: every path that clients can reach, and what is done with it. Only data.

All other paths get a 404 from the proxy: engines have routes that put them to sleep, load weights or run code.
`docs/reference/routes.md` documents the table; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdproxy.wire.api_errors import Dialect

MODELS = "/v1/models"
_KEY_ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/responses/{response_id}": "responses",
    "/v1/responses/{response_id}/cancel": "responses",
}
"""Names of routes in lines of keys that are not the last part of a path."""


class RouteKind(Enum):
    """What is done with a request."""

    SPLIT = "split"  # prefill and decode apart: the data path
    PASSED = "passed"  # whole to one engine that serves the model alone
    OWN = "own"  # answered by pdproxy
    REFUSED = "refused"  # a 404 that states why it can't work


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """One path. `why`: its purpose, or why it is refused. `slow`: the model generates, so only `deadlines.total` bounds it."""

    path: str
    methods: tuple[str, ...]
    kind: RouteKind
    why: str
    dialect: Dialect = Dialect.OPENAI
    slow: bool = True

    @property
    def key_route(self) -> str:
        """The name of the route in lines of keys (`routes=`): paths of one purpose share it."""
        return _KEY_ROUTES.get(self.path) or self.path.rpartition("/")[2]

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key, where clients have keys."""
        return self.kind is not RouteKind.OWN or self.path == MODELS

    @property
    def generates(self) -> bool:
        """Whether an answer is as long as the model makes it."""
        return self.slow and self.dialect is not Dialect.OPENAI

    @property
    def has_body(self) -> bool:
        """Whether requests have a body."""
        return "POST" in self.methods


def _passed(path: str, why: str, dialect: Dialect = Dialect.OPENAI, *, slow: bool = True) -> RouteEntry:
    return RouteEntry(path, ("POST",), RouteKind.PASSED, why, dialect, slow)


TABLE: tuple[RouteEntry, ...] = (
    RouteEntry("/v1/completions", ("POST",), RouteKind.SPLIT, "complete prompts"),
    RouteEntry("/v1/chat/completions", ("POST",), RouteKind.SPLIT, "answer chats"),
    RouteEntry(
        "/v1/chat/completions/batch",
        ("POST",),
        RouteKind.SPLIT,
        "answer several chats, each as one of a list of prompts",
    ),
    RouteEntry(
        "/invocations", ("POST",), RouteKind.SPLIT, "SageMaker's route for chats, completions and all that is pooled"
    ),
    _passed("/v1/responses", "OpenAI's Responses API, without memory", Dialect.RESPONSES),
    RouteEntry("/v1/responses/{response_id}", ("GET",), RouteKind.REFUSED, "no response is stored"),
    RouteEntry(
        "/v1/responses/{response_id}/cancel", ("POST",), RouteKind.REFUSED, "no response runs in the background"
    ),
    _passed("/v1/messages", "Anthropic's Messages API", Dialect.MESSAGES),
    _passed("/v1/messages/count_tokens", "count a message's tokens", Dialect.MESSAGES, slow=False),
    _passed("/tokenize", "token ids of a prompt or a chat", slow=False),
    _passed("/detokenize", "text of token ids", slow=False),
    RouteEntry(
        "/tokenizer_info", ("GET",), RouteKind.PASSED, "an engine's tokenizer, where its flag allows it", slow=False
    ),
    _passed("/generative_scoring", "score texts by the next token of a generating model"),
    _passed("/v1/decisions", "OpenAI's Decisions API: answers to questions, each with its probability"),
    _passed("/v1/systemone", "the same in vLLM's own form"),
    _passed("/v1/embeddings", "embed texts"),
    _passed("/pooling", "what a pooling model makes of texts"),
    _passed("/classify", "classify texts"),
    _passed("/score", "score pairs of texts"),
    _passed("/v1/score", "score pairs of texts"),
    _passed("/rerank", "rank documents for a query"),
    _passed("/v1/rerank", "rank documents for a query"),
    _passed("/v2/rerank", "rank documents for a query"),
    RouteEntry(MODELS, ("GET",), RouteKind.OWN, "the models that the engines serve, each once"),
    RouteEntry("/health", ("GET",), RouteKind.OWN, "whether the process runs"),
    RouteEntry("/ping", ("GET", "POST"), RouteKind.OWN, "as /health, under SageMaker's name"),
    RouteEntry("/ready", ("GET",), RouteKind.OWN, "whether a request could be served"),
    RouteEntry(
        "/ready/proxy",
        ("GET",),
        RouteKind.OWN,
        "whether this proxy takes requests, whatever its engines do: for balancers",
    ),
    RouteEntry(
        "/healthcheck", ("GET",), RouteKind.OWN, "as vLLM's demo proxies: that the process runs, its engines by role"
    ),
    RouteEntry("/load", ("GET",), RouteKind.OWN, "the number of requests in flight"),
    RouteEntry("/version", ("GET",), RouteKind.OWN, "pdproxy's version"),
    RouteEntry("/metrics", ("GET",), RouteKind.OWN, "Prometheus metrics"),
)
ENTRIES = {entry.path: entry for entry in TABLE}
"""The table by path."""
KEY_ROUTES = frozenset(entry.key_route for entry in TABLE if entry.needs_key and entry.path != MODELS)
"""What lines of keys may name. Each key may list the models that it is good for."""
