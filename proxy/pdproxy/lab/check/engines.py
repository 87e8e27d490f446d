"""Asks each engine who it is and whether it works, by itself. One engine's trouble ends the questions to it, not the check."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from pdproxy.fleet.prober import CANARY
from pdproxy.lab.check import prompts
from pdproxy.lab.check.ask import Asker, Reply
from pdproxy.lab.check.facts import Card, EngineFacts, Generated, Trouble, TroubleKind
from pdproxy.lab.check.metrics import Metrics, read
from pdproxy.settings.schema import Node

_LEFT_OPEN = (400, 403, 404, 405, 501)
"""Statuses of an engine that has no such route, or refuses it: the question stays open."""
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


async def ask_engine(asker: Asker, node: Node, mark: str, *, generates: bool = True) -> EngineFacts:
    """Return what an engine says of itself; `mark` must be fresh. `generates`: it is asked to, which some can't alone."""
    facts = EngineFacts(url=node.url, role=node.role, sources=frozenset(node.sources), block_size=node.facts.block_size)
    facts.addresses = await resolve(urlsplit(node.url).hostname or "", asker.timeout)
    try:
        await _ask_all(asker, facts)
        if generates and not facts.is_proxy:
            await _generate(asker, facts, mark)
    except _TroubleError as error:
        facts.trouble = error.trouble
    return facts


async def scrape(asker: Asker, url: str) -> Metrics | None:
    """Return an engine's metrics, None if it shows none that can be read."""
    reply = await asker.get(url, "/metrics")
    return read(reply.body.decode("utf-8", "replace")) if isinstance(reply, Reply) and reply.status == 200 else None


async def resolve(host: str, timeout: float) -> frozenset[str]:
    """Return a host's IP addresses; none if it has none, or if nobody could say in time."""
    try:
        async with asyncio.timeout(timeout):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return frozenset()
    return frozenset(str(address[0]) for *_, address in found)


class Miss(msgspec.Struct, frozen=True):
    """A completion that did not come. `status` None: no answer at all; `silent`: none in time, and it may yet be at work."""

    text: str
    status: int | None = None
    silent: bool = False


async def complete(asker: Asker, url: str, body: bytes, request_id: str) -> Generated | Miss:
    """Return what an engine completes, or why it did not."""
    reply = await asker.post(url, prompts.PATH, body, request_id)
    if isinstance(reply, Trouble):
        return Miss(reply.text, silent=reply.kind == "silent")
    if reply.status != 200:
        return Miss(f"answered {reply.words()}", reply.status)
    said = prompts.generated(reply.body)
    return said if said is not None else Miss("its answer is no completion", 200)


async def _ask_all(asker: Asker, facts: EngineFacts) -> None:
    health = await _got(asker, facts.url, "/health")
    facts.skew = health.ahead
    facts.metrics = await scrape(asker, facts.url)
    if facts.metrics is not None:
        if facts.metrics.pdproxy:
            return
        facts.block_size = facts.block_size or facts.metrics.block_size
    facts.cards = tuple(_read("/v1/models", await _got(asker, facts.url, "/v1/models"), _Models).data)
    if (version := await _maybe(asker, facts.url, "/version")) is not None:
        facts.version = _read("/version", version, _Version).version
    canary: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name in sorted(facts.base_names):
        plain = await _ids(asker, facts.url, {"model": name, "prompt": CANARY})
        chat = await _ids(asker, facts.url, {"model": name, "messages": [{"role": "user", "content": CANARY}]})
        canary[name] = plain, chat
    facts.canary = canary


async def _generate(asker: Asker, facts: EngineFacts, mark: str) -> None:
    said: list[Generated] = []
    for number, prompt in enumerate(prompts.CANARIES if facts.base_names else ()):
        text = prompts.fitting(prompt, facts.max_model_len)
        body = prompts.body(min(facts.base_names), text, salt=f"{mark}-{number}")
        begun = time.time()
        answer = await complete(asker, facts.url, body, f"pdproxy-check-{mark}-{number}")
        if isinstance(answer, Miss):
            facts.mute = answer.text
            return
        said.append(answer)
        if not facts.skew and answer.created and not begun - 2 <= answer.created <= time.time() + 1:
            facts.skew = answer.created - begun
    facts.said = tuple(said)


async def _got(asker: Asker, url: str, path: str) -> Reply:
    reply = await asker.get(url, path)
    if isinstance(reply, Trouble):
        raise _TroubleError(reply)
    if reply.status in (401, 403):
        raise _TroubleError(Trouble("key", f"{path} answered {reply.status}"))
    if reply.status != 200:
        kind: TroubleKind = "unhealthy" if path == "/health" and reply.status >= 500 else "broken"
        raise _TroubleError(Trouble(kind, f"{path} answered {reply.words()}"))
    return reply


async def _maybe(asker: Asker, url: str, path: str, body: bytes | None = None) -> Reply | None:
    """Return the answer, None where the engine has no such route or refuses it."""
    reply = await (asker.get(url, path) if body is None else asker.post(url, path, body))
    if isinstance(reply, Trouble):
        raise _TroubleError(reply)
    if reply.status in _LEFT_OPEN:
        return None
    if reply.status != 200:
        raise _TroubleError(Trouble("broken", f"{path} answered {reply.words()}"))
    return reply


async def _ids(asker: Asker, url: str, body: dict[str, object]) -> tuple[int, ...]:
    # A base model without a chat template answers 400: that is its identity, too.
    reply = await _maybe(asker, url, "/tokenize", msgspec.json.encode(body))
    return tuple(_read("/tokenize", reply, _Tokens).tokens) if reply is not None else ()


def _read(path: str, reply: Reply, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _TroubleError(Trouble("broken", f"{path} answered something else: {error}")) from None
