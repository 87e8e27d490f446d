"""What a decode leg shows first: its data, the whole of an answer that comes in one piece, or that the engine has the request."""

from __future__ import annotations

from functools import partial

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import EngineTimeoutError, Wait
from pdproxy.scheduling.nodes import Node
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.serving.stream.relay import Relay, StreamStarted
from pdproxy.upstream.client import Answer
from pdproxy.wire.request import Parsed

ACCEPT_GRACE = 0.15
"""Seconds that a decode leg may take to show that the engine has the request, once its client has left (0.2 s in all)."""
ACCEPTED_UNSEEN = 1.0
"""Seconds after which an engine that is asked for an unstreamed answer counts as having the request."""


async def first_data(
    engines: ExchangeResources, relay: Relay, node: Node, *, in_silence: bool
) -> Answer | StreamStarted:
    """Wait for the first data, or the whole of an unstreamed answer.

    Of the latter, and of thoughts that the client doesn't want to see, nothing is seen before their end (`in_silence`). An
    engine that was stopped meanwhile may keep the connection open for ever: once probes have found it down for as long as a
    stream may be silent, it is given up.

    Raises:
        EngineError: the leg failed, or the engine is down.
    """
    if not in_silence:
        return await relay.first
    patience = engines.deadlines.between_tokens
    timers: list[Timer] = []
    look = partial(_look, engines, relay, node, patience, timers)
    timers.append(engines.clock.after(min(patience, 1.0), look))
    try:
        return await relay.first
    finally:
        timers[-1].cancel()


async def accepted(engines: ExchangeResources, parsed: Parsed, relay: Relay, asked: float) -> bool:
    """Tell whether the engine has the request, giving it a moment to show it: then closing the leg frees the KV.

    A stream shows it by its headers. An answer that is not streamed shows nothing before its end: there, time does. `asked`
    is when the leg was sent.
    """
    if not parsed.stream and engines.now() - asked > ACCEPTED_UNSEEN:
        return True
    try:
        async with engines.clock.within(ACCEPT_GRACE):
            await relay.accepted.wait()
    except TimeoutError:
        return False
    return relay.status == 200  # refused or lost: then the engine owns nothing


def _look(engines: ExchangeResources, relay: Relay, node: Node, patience: float, timers: list[Timer]) -> None:
    if node.down_for(engines.now()) >= patience:
        message = f"{node.url} has been down for {patience:g} s"
        relay.failed(EngineTimeoutError(message, wait=Wait.BETWEEN_TOKENS))
    else:
        look = partial(_look, engines, relay, node, patience, timers)
        timers[:] = [engines.clock.after(min(patience, 1.0), look)]
