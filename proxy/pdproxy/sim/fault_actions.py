"""What each kind of fault does when its moment has come.

Owns the doing. `passing` is for the kinds that leave the answer to the application: they change how it is written, or make
the engine ill. `act` is for those that take the answer over: when it returns, the answer is complete or the connection gone.
"""

from __future__ import annotations

from dataclasses import replace
from http.client import responses
from typing import TYPE_CHECKING, Any

import msgspec

from pdproxy.sim.api.errors import error_body, error_event
from pdproxy.sim.fault_kinds import Moment
from pdproxy.sim.faults import Armed, Fault
from pdproxy.sim.request import EngineDeadError
from pdproxy.sim.sse import DONE
from pdproxy.sim.transport import GARBAGE

if TYPE_CHECKING:
    from starlette.types import Message

    from pdproxy.sim.exchange import Exchange

_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_JSON = (b"content-type", b"application/json")
_VARY = (b"vary", b"Origin")
_NO_JSON = b'{"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"te'
_TYPES = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}


def goes_on(fault: Fault) -> bool:
    """Tell whether the engine works on for an answer that has been taken over."""
    return fault.kind in ("stall", "kill", "restart", "no_fin")


def passing(armed: Armed, at: Moment, exchange: Exchange) -> bool:
    """Do what leaves the answer to the application; return whether it does."""
    fault, style, engine = armed.fault, exchange.writer.style, exchange.host.engine
    args: dict[str, Any] = fault.args
    match fault.kind:
        case "slow":
            exchange.restyle(replace(style, delay=args["delay"]))
        case "split":
            exchange.restyle(replace(style, cuts=args["cuts"], cut_delay=args["delay"], chance=armed.chance))
        case "join":
            exchange.restyle(replace(style, join=args["count"]))
        case "lease_expiry":
            engine.expire_leases()
        case "load_failure":
            engine.fail_loads()
        case "freeze":
            exchange.host.freeze_now(float(args["seconds"]))
        case "dead_core":
            engine.kill_core()
            # What the API server has in hand is written; a stream's next event would have come from the core.
            return not (exchange.request.stream and exchange.writer.head_out) or at == "after"
        case _:
            return at == "after" and _behind(fault, exchange)
    return True


def _behind(fault: Fault, exchange: Exchange) -> bool:
    """Do what befalls a connection right behind a whole answer, before the next request can be read; return whether it did."""
    line = exchange.line
    match fault.kind:
        case "reset":
            line.wire.reset()
        case "eof":
            line.wire.close()
        case "stall":
            line.deafen()
        case "garbage":
            line.wire.write(GARBAGE)
            if fault.args["close"]:
                line.wire.close()
        case _:
            return False
    return True


async def act(fault: Fault, exchange: Exchange) -> None:
    """Give the client what a fault says instead of the answer."""
    await exchange.writer.flush()
    match fault.kind:
        case "reset":
            exchange.ended()
            exchange.line.wire.reset()
        case "eof":
            exchange.ended()
            exchange.line.wire.close()
        case "stall":
            pass
        case "half_chunk":
            await _half(exchange)
        case "garbage" if fault.args["what"] == "http":
            await _noise(fault, exchange)
        case "kill" | "restart" | "no_fin":
            exchange.host.stop_soon(fault.kind, float(fault.args.get("down", 0.0)))
        case _:
            await _answer(fault, exchange)
            exchange.ended()
            return
    if not exchange.line.complete:
        await exchange.gone.wait()


async def _noise(fault: Fault, exchange: Exchange) -> None:
    await exchange.writer.raw(GARBAGE)
    if fault.args["close"]:
        exchange.ended()
        exchange.line.wire.close()


async def _half(exchange: Exchange) -> None:
    """Write half of what is due, and close."""
    if not exchange.writer.head_out and exchange.start is not None:
        await exchange.writer.send(exchange.start)
    due = exchange.due or {"type": "http.response.body", "body": b"data: " + _NO_JSON, "more_body": True}
    data, _ = await exchange.writer.rendered(due)
    await exchange.writer.raw(data[: len(data) - len(data) // 2])
    exchange.ended()
    exchange.line.wire.close()


async def _answer(fault: Fault, exchange: Exchange) -> None:
    """Complete the answer in another way than the application would have."""
    args, send = fault.args, exchange.writer.send
    match fault.kind:
        case "status":
            await _status(fault, exchange)
        case "empty_body":
            await _whole(exchange, 200, b"")
        case "empty_stream":
            await _stream(exchange, DONE if args["done"] else b"")
        case "no_done":
            await _stream(exchange)
        case "error_event":
            event = error_event(str(args["message"]), status=int(args["code"]))
            await _stream(exchange, event, DONE if args["done"] else b"")
        case "dead_core":
            await _stream(exchange, error_event(str(EngineDeadError())), DONE)
        case "abort_finish" if exchange.request.stream:
            await _stream(exchange, _aborted_event(exchange), DONE)
        case "abort_finish":
            await _whole(exchange, 200, _aborted(_body(exchange)))
        case "garbage" if exchange.request.stream:
            await _stream(exchange, b"data: " + _NO_JSON + b"\n\n", DONE)
        case "garbage" if exchange.writer.head_out:  # the length is out: as many bytes, and no JSON
            size = len(_body(exchange))
            await send({"type": "http.response.body", "body": (_NO_JSON * (size // len(_NO_JSON) + 1))[:size]})
        case "garbage":
            await _whole(exchange, 200, _NO_JSON)
        case kind:  # pragma: no cover - a kind without an act is a defect
            raise NotImplementedError(kind)


async def _whole(exchange: Exchange, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    named = [(b"content-length", b"%d" % len(body)), _JSON, _VARY, *headers]
    await exchange.writer.send({"type": "http.response.start", "status": status, "headers": named})
    await exchange.writer.send({"type": "http.response.body", "body": body, "more_body": False})


async def _stream(exchange: Exchange, *events: bytes) -> None:
    """Write events and the proper end, and before them the head if it is not out."""
    if not exchange.writer.head_out:
        start: Message = {"type": "http.response.start", "status": 200, "headers": [_SSE, _VARY]}
        await exchange.writer.send(start)
    for event in filter(None, events):
        await exchange.writer.send({"type": "http.response.body", "body": event, "more_body": True})
    await exchange.writer.send({"type": "http.response.body", "body": b"", "more_body": False})


async def _status(fault: Fault, exchange: Exchange) -> None:
    status, body = int(fault.args["status"]), str(fault.args["body"]).encode()
    headers = []
    if 300 <= status < 400:
        headers.append((b"location", str(fault.args["location"]).encode()))
    elif not body:
        phrase = responses.get(status, str(status))
        body = msgspec.json.encode(error_body(phrase, _TYPES.get(status, "InternalServerError"), status))
    await _whole(exchange, status, body, *headers)


def _body(exchange: Exchange) -> bytes:
    assert exchange.due is not None
    return bytes(exchange.due.get("body", b""))


def _aborted_event(exchange: Exchange) -> bytes:
    """Return the event that was due, given up."""
    return b"data: " + _aborted(_body(exchange).removeprefix(b"data: ").strip()) + b"\n\n"


def _aborted(answer: bytes) -> bytes:
    body = msgspec.json.decode(answer)
    body["choices"] = [_given_up(choice) for choice in body["choices"]]
    return msgspec.json.encode(body)


def _given_up(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice that says "abort"; keys in vLLM's order."""
    made: dict[str, Any] = {}
    for key, value in choice.items():
        made[key] = value
        if key == "finish_reason":
            made |= {"finish_reason": "abort", "stop_reason": None}
    if "delta" in made:
        made["delta"] = {"content": ""}
    return made
