"""Asks each engine for its identity and whether it works alone. A failing engine gets no more
requests; the check goes on.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from pdproxy.check import prompts
from pdproxy.check.facts import Card, Encoding, EngineFacts, Generated, Trouble, TroubleKind
from pdproxy.check.http_client import HttpClient, Reply
from pdproxy.check.metrics import EngineMetrics, read
from pdproxy.fleet.prober import CANARY
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.wire.route import Route

_UNSUPPORTED = (400, 403, 404, 405, 501)
"""Statuses of an engine that has no such route, or refuses it: the fact stays unknown."""
_T = TypeVar("_T")


class _TroubleError(Exception):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.text)
        self.trouble = trouble


class _Models(msgspec.Struct):
    data: list[Card]


class _Version(msgspec.Struct):
    version: str = ""


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def ask_engine(
    http: HttpClient, engine: ConfiguredEngine, mark: str, *, generates: bool = True
) -> EngineFacts:
    """Return the facts of one engine; `mark` must be unique. `generates`: also its completions,
    which some can't do alone. An encoder engine, which has none, is asked about a picture.
    """
    facts = EngineFacts(
        url=engine.url,
        role=engine.role,
        sources=frozenset(engine.sources),
        block_size=engine.facts.block_size,
    )
    facts.addresses = await resolve(urlsplit(engine.url).hostname or "", http.timeout)
    try:
        await _ask_all(http, facts)
        if facts.is_proxy:
            return facts
        if engine.encodes:
            await _encode(http, facts, mark)
        elif generates:
            await _generate(http, facts, mark)
    except _TroubleError as error:
        facts.trouble = error.trouble
    return facts


async def scrape(http: HttpClient, url: str) -> EngineMetrics | None:
    """Return an engine's metrics, None if it has none that can be read."""
    reply = await http.get(url, "/metrics")
    return (
        read(reply.body.decode("utf-8", "replace"))
        if isinstance(reply, Reply) and reply.status == 200
        else None
    )


async def resolve(host: str, timeout: float) -> frozenset[str]:
    """Return a host's IP addresses; none if it has none, or if there was no answer in time."""
    try:
        async with asyncio.timeout(timeout):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, None, type=socket.SOCK_STREAM
            )
    except (OSError, TimeoutError, UnicodeError):
        return frozenset()
    return frozenset(str(address[0]) for *_, address in found)


class NoAnswer(msgspec.Struct, frozen=True):
    """A completion that failed. `status` None: no answer at all; `silent`: none in time, so the
    engine may still work on it.
    """

    text: str
    status: int | None = None
    silent: bool = False


async def complete(
    http: HttpClient, url: str, body: bytes, request_id: str
) -> Generated | NoAnswer:
    """Return an engine's completion, or why there is none."""
    reply = await http.post(url, prompts.PATH, body, request_id)
    if isinstance(reply, Trouble):
        return NoAnswer(reply.text, silent=reply.kind == "silent")
    if reply.status != 200:
        return NoAnswer(f"answered {reply.summary()}", reply.status)
    completion = prompts.generated(reply.body)
    return completion if completion is not None else NoAnswer("its answer is not a completion", 200)


async def _ask_all(http: HttpClient, facts: EngineFacts) -> None:
    health = await _got(http, facts.url, "/health")
    facts.clock_skew = health.ahead
    facts.metrics = await scrape(http, facts.url)
    if facts.metrics is not None:
        if facts.metrics.pdproxy:
            return
        facts.block_size = facts.block_size or facts.metrics.block_size
    facts.cards = tuple(
        _read("/v1/models", await _got(http, facts.url, "/v1/models"), _Models).data
    )
    if (version := await _maybe(http, facts.url, "/version")) is not None:
        facts.version = _read("/version", version, _Version).version
    canary: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name in sorted(facts.base_names):
        plain = await _ids(http, facts.url, {"model": name, "prompt": CANARY})
        chat = await _ids(
            http, facts.url, {"model": name, "messages": [{"role": "user", "content": CANARY}]}
        )
        canary[name] = plain, chat
    facts.canary = canary


async def _generate(http: HttpClient, facts: EngineFacts, mark: str) -> None:
    completions: list[Generated] = []
    for number, prompt in enumerate(prompts.CANARIES if facts.base_names else ()):
        text = prompts.fitting(prompt, facts.max_model_len)
        body = prompts.body(min(facts.base_names), text, salt=f"{mark}-{number}")
        begun = time.time()
        answer = await complete(http, facts.url, body, f"pdproxy-check-{mark}-{number}")
        if isinstance(answer, NoAnswer):
            facts.no_output = answer.text
            return
        completions.append(answer)
        if (
            not facts.clock_skew
            and answer.created
            and not begun - 2 <= answer.created <= time.time() + 1
        ):
            facts.clock_skew = answer.created - begun
    facts.completions = tuple(completions)


async def _encode(http: HttpClient, facts: EngineFacts, mark: str) -> None:
    if not facts.base_names:
        return
    body = prompts.to_encode(min(facts.base_names), mark)
    reply = await http.post(facts.url, Route.CHAT.path, body, f"pdproxy-check-{mark}")
    if isinstance(reply, Trouble):
        facts.encoding = Encoding(reply.text)
    elif reply.status != 200:
        facts.encoding = Encoding(f"it answered {reply.summary()}")
    else:
        facts.encoding = prompts.encoding(reply.body)


async def _got(http: HttpClient, url: str, path: str) -> Reply:
    reply = await http.get(url, path)
    if isinstance(reply, Trouble):
        raise _TroubleError(reply)
    if reply.status in (401, 403):
        raise _TroubleError(Trouble("key", f"{path} answered {reply.status}"))
    if reply.status != 200:
        kind: TroubleKind = "unhealthy" if path == "/health" and reply.status >= 500 else "broken"
        raise _TroubleError(Trouble(kind, f"{path} answered {reply.summary()}"))
    return reply


async def _maybe(http: HttpClient, url: str, path: str, body: bytes | None = None) -> Reply | None:
    """Return the answer, None where the engine has no such route or refuses it."""
    reply = await (http.get(url, path) if body is None else http.post(url, path, body))
    if isinstance(reply, Trouble):
        raise _TroubleError(reply)
    if reply.status in _UNSUPPORTED:
        return None
    if reply.status != 200:
        raise _TroubleError(Trouble("broken", f"{path} answered {reply.summary()}"))
    return reply


async def _ids(http: HttpClient, url: str, body: dict[str, object]) -> tuple[int, ...]:
    # A base model without a chat template answers 400, which also identifies it.
    reply = await _maybe(http, url, "/tokenize", msgspec.json.encode(body))
    return tuple(_read("/tokenize", reply, _Tokens).tokens) if reply is not None else ()


def _read(path: str, reply: Reply, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _TroubleError(Trouble("broken", f"{path} sent an invalid answer: {error}")) from None
