"""The first sign of a decode leg: its data, a whole answer, or the proof that the engine has the request."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import EngineError, EngineTimeoutError, Wait
from pdproxy.kit.frames import drop_traceback
from pdproxy.scheduling.nodes import Node
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.serving.stream.phase import StreamStarted
from pdproxy.serving.stream.relay import Relay
from pdproxy.upstream.client import Answer

ACCEPT_GRACE = 0.15
"""After the client has left: seconds for the decode engine to show that it has the request (0.2 s with the clock's tick), and as
many from a stream's headers to its first data."""
ACCEPTED_UNSEEN = 1.0
"""Seconds behind which an engine that is healthy has the request, if the answer is not streamed; and that it has to say so."""


def first_data(
    resources: ExchangeResources, relay: Relay, node: Node, *, in_silence: bool
) -> Awaitable[Answer | StreamStarted]:
    """Wait for the first data, or the whole of an unstreamed answer.

    `in_silence`: the engine sends nothing before its answer is whole, or before reasoning that the client doesn't want is over.
    Such an engine may be stopped meanwhile while its connection stays open. So the leg fails once probes have found the engine
    down for `deadlines.between_tokens`.

    Raises:
        EngineError: the leg failed, or the engine is down.
    """
    return _from_silence(resources, relay, node) if in_silence else relay.first


async def _from_silence(resources: ExchangeResources, relay: Relay, node: Node) -> Answer | StreamStarted:
    timeout = resources.deadlines.between_tokens
    timers: list[Timer] = []
    look = partial(_look, resources, relay, node, timeout, timers)
    timers.append(resources.clock.after(min(timeout, 1.0), look))
    try:
        return await relay.first
    finally:
        timers[-1].cancel()


def awaits_data(relay: Relay) -> bool:
    """Return whether an answer's first data may still come."""
    return not relay.first.done()


def has_data(relay: Relay) -> bool:
    """Return whether an answer's first data has come, or the whole answer."""
    first = relay.first
    return first.done() and not first.cancelled() and first.exception() is None


async def accepted(resources: ExchangeResources, url: str, relay: Relay, sent_at: float, *, stream: bool) -> bool:
    """Return whether the engine has the request, which was written at `sent_at`. If it has, closing the leg frees the KV.

    A stream shows it by its headers, unless an error follows: an engine may refuse a request in the stream. What shows nothing
    behind its headers waits for its turn, or for KV. An answer that is not streamed shows nothing before its end. Then the engine
    is asked for its health, if it has had `ACCEPTED_UNSEEN` seconds: one that stands still may not have read the request.
    """
    if not stream and resources.now() - sent_at > ACCEPTED_UNSEEN:
        return await _answers(resources, url)
    try:
        async with resources.clock.within(ACCEPT_GRACE):
            await relay.accepted.wait()
    except TimeoutError:
        return False
    if relay.status != 200:
        return False  # refused or lost: then the engine owns nothing
    try:
        async with resources.clock.within(ACCEPT_GRACE):
            await relay.first_again()
    except EngineError as error:
        drop_traceback(error)
        return isinstance(error, EngineTimeoutError)  # a deadline on its silence ended it, as the client did
    except TimeoutError:
        pass
    return True


async def _answers(resources: ExchangeResources, url: str) -> bool:
    try:
        async with resources.clock.within(ACCEPTED_UNSEEN):
            return await resources.is_alive(url)
    except TimeoutError:
        return False


async def begun(resources: ExchangeResources, relay: Relay, sent_at: float) -> None:
    """Wait until the engine has had `ACCEPT_GRACE` since `sent_at` to begin with the request.

    One that is closed before the engine's scheduler has seen it asks for no KV, and nothing else could free it.
    """
    try:
        async with resources.clock.within(max(0.0, sent_at - resources.now() + ACCEPT_GRACE)):
            await relay.first_again()
    except EngineError as error:
        drop_traceback(error)
    except TimeoutError:
        pass


def _look(resources: ExchangeResources, relay: Relay, node: Node, timeout: float, timers: list[Timer]) -> None:
    if node.down_for(resources.now()) >= timeout:
        message = f"{node.url} has been down for {timeout:g} s"
        relay.failed(EngineTimeoutError(message, wait=Wait.BETWEEN_TOKENS))
    else:
        look = partial(_look, resources, relay, node, timeout, timers)
        timers[:] = [resources.clock.after(min(timeout, 1.0), look)]
