"""What a client was told: an HTTP answer read from a connection, and the texts, ends and counts in
it. No judgement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

_MAX_HEAD = 64 << 10
UNNAMED = "?"
"""The reason of a refusal whose API has no place for it."""
_LAST = ("response.completed", "response.incomplete", "message_stop")


class Answer(msgspec.Struct):
    """One HTTP answer as far as it came. `complete`: the body came to its proper end."""

    status: int = 0
    content_type: str = ""
    closes: bool = False
    retry_after: str = ""
    body: bytearray = msgspec.field(default_factory=bytearray)
    complete: bool = False


class MalformedError(Exception):
    """What came is no answer of an OpenAI server. `str()` says why."""


class Told(msgspec.Struct):
    """The content of an answer. `texts` and `ends` by choice, a response or a message is choice 0;
    `usage`: prompt, completion and total tokens.
    """

    texts: dict[int, str] = msgspec.field(default_factory=dict)
    ends: dict[int, str] = msgspec.field(default_factory=dict)
    usage: tuple[int, int, int] | None = None
    error: dict[str, Any] | None = None
    """An error event, or the error of a body."""


async def read_answer(
    reader: asyncio.StreamReader, into: Answer, pace: float = 0.0, piece: int = 1 << 16
) -> None:
    """Read one answer; what came is in `into` also if this is cancelled or fails. `pace`: seconds
    between reads of `piece` bytes.

    Raises:
        OSError, EOFError: the connection ended before the answer's end.
        MalformedError: it is no HTTP.
    """
    head = (await reader.readuntil(b"\r\n\r\n"))[:_MAX_HEAD].decode("latin-1").split("\r\n")
    try:
        into.status = int(head[0].split(" ")[1])
    except (IndexError, ValueError):
        raise MalformedError(f"a status line {head[0][:80]!r}") from None
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:])
    }
    into.content_type = headers.get("content-type", "")
    into.closes = headers.get("connection") == "close"
    into.retry_after = headers.get("retry-after", "")
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            await _read(reader, size, into, pace, piece)
            if await reader.readexactly(2) != b"\r\n":
                raise MalformedError("a chunk without its end")
        await reader.readexactly(2)
    elif "content-length" in headers:
        await _read(reader, int(headers["content-length"]), into, pace, piece)
    else:
        raise MalformedError("an answer without a length")
    into.complete = True


async def _read(
    reader: asyncio.StreamReader, size: int, into: Answer, pace: float, piece: int
) -> None:
    while size:
        if pace:
            await asyncio.sleep(pace)
        data = await reader.read(min(size, piece))
        if not data:
            raise EOFError("the connection ended within an answer")
        into.body += data
        size -= len(data)


def told(answer: Answer) -> Told:
    """Return the content of a complete answer.

    Raises:
        MalformedError: it is not well-formed.
    """
    body = bytes(answer.body)
    if answer.content_type.startswith("text/event-stream"):
        return _streamed(body)
    found = Told()
    _add(found, _json(body), whole=True)
    return found


def _streamed(body: bytes) -> Told:
    found = Told()
    events = body.split(b"\n\n")
    if events.pop():
        raise MalformedError(f"a stream that ends within an event: {body[-80:]!r}")
    # comments: the stream was silent for a while, perhaps at its beginning
    events = [one for one in events if not one.startswith(b": ") or b"\n" in one]
    done = False
    for number, event in enumerate(events):
        if number == 0 and event.startswith(b"event: "):
            return _named(events)
        if not event.startswith(b"data: "):
            raise MalformedError(f"an event {event[:80]!r}")
        payload = event[6:]
        if done or found.error is not None:
            if payload == b"[DONE]" and not done:
                done = True
                continue
            raise MalformedError(f"an event behind the end: {event[:80]!r}")
        if payload == b"[DONE]":
            done = True
        else:
            _add(found, _json(payload), whole=False)
        if number == len(events) - 1 and not done and found.error is None:
            raise MalformedError("a stream without [DONE] and without an error event")
    if not events:
        raise MalformedError("a stream without events")
    return found


def _named(events: list[bytes]) -> Told:
    """Return the content of a stream of a response or a message. Its numbers must follow each
    other, and one of its last events must end it.
    """
    found = Told()
    texts, numbers, over = [""], 0, False
    for event in events:
        name, _, payload = event.partition(b"\ndata: ")
        data = _json(payload)
        kind = str(data.get("type"))
        if name != f"event: {kind}".encode() or b"\n" in payload:
            raise MalformedError(f"an event {event[:80]!r}")
        if over:
            raise MalformedError(f"an event behind the end: {event[:80]!r}")
        if "response" in kind or "sequence_number" in data:
            if data.get("sequence_number") != numbers:
                raise MalformedError(f"not number {numbers}: {event[:80]!r}")
            numbers += 1
        over = kind == "error" or kind in _LAST
        match kind:
            case "error":
                found.error = _error(data.get("error", data), {"type", "message"})
            case "response.output_text.delta":
                texts.append(data["delta"])
            case "content_block_delta":
                texts.append(data["delta"]["text"])
            case "response.completed" | "response.incomplete":
                _add(found, data["response"], whole=True)
                if found.texts != {0: "".join(texts)}:
                    raise MalformedError(f"a response that is not its events: {found.texts}")
            case "message_delta":
                found.ends[0] = data["delta"]["stop_reason"]
                found.usage = _counts(data["usage"])
    if not over:
        raise MalformedError("a stream without its last event and without an error event")
    found.texts[0] = "".join(texts)
    return found


def _counts(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return what a response or a message has used. A message counts what was cached apart."""
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    prompt = usage["input_tokens"] + sum(usage.get(name) or 0 for name in cached)
    return prompt, usage["output_tokens"], prompt + usage["output_tokens"]


def _error(error: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(error, dict) or not names <= set(error) or not error["message"]:
        raise MalformedError(f"an error {str(error)[:80]}")
    return error


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise MalformedError(f"no JSON: {data[:80]!r}") from None
    if not isinstance(found, dict):
        raise MalformedError(f"no object: {data[:80]!r}")
    return found


def _add(found: Told, event: dict[str, Any], *, whole: bool) -> None:
    if event.get("type") == "error":
        found.error = {"reason": UNNAMED, **_error(event["error"], {"type", "message"})}
        return
    if event.get("error") is not None:
        found.error = _error(event["error"], {"message", "type", "param", "code"})
        return
    if "content" in event or "output" in event:
        items = event.get("output", [event])  # a stream without text has none
        if len(items) > 1:
            raise MalformedError(f"{len(items)} items of output")
        found.texts[0] = "".join(part["text"] for item in items for part in item["content"])
        found.ends[0] = event.get("stop_reason") or event["status"]
        found.usage = _counts(event["usage"])
        return
    for choice in event.get("choices", ()):
        index = choice["index"]
        part = choice.get("message" if whole else "delta") or {}
        text = choice.get("text") or part.get("content") or ""
        found.texts[index] = found.texts.get(index, "") + text
        if (end := choice.get("finish_reason")) is not None:
            if index in found.ends:
                raise MalformedError(f"choice {index} ends twice")
            found.ends[index] = end
        elif index in found.ends and text:
            raise MalformedError(f"text behind the end of choice {index}")
    if (usage := event.get("usage")) is not None:
        found.usage = (
            usage["prompt_tokens"],
            usage.get("completion_tokens") or 0,
            usage["total_tokens"],
        )
