"""What is right: the requests of a seed with the answers of an engine alone that nothing happens
to, and the judge.
"""

from __future__ import annotations

import asyncio
import random
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.chaos.access import Refusals
from tests.chaos.answers import UNNAMED, Answer, MalformedError, Told, read_answer, told
from tests.chaos.virtual.network import VirtualNetwork
from tests.fakes.pictures import asking, png, url

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATES = (COMPLETIONS, CHAT)
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
NAMED = (RESPONSES, MESSAGES)
"""Routes with streams that no other engine goes on with."""
BODIES = 24
"""Different requests of a seed."""
_WORDS = ("river", "mountain", "harbour", "ledger", "copper", "window", "a", "the", "of")
_ALLOWED = frozenset({500, 502, 503, 504})
"""Statuses that say that the engines or the proxy could not, whatever the request."""
_OWN = "deadline"
"""The reason for which only requests with a deadline are refused."""
_LONGEST = 60
"""Seconds in `Retry-After`."""


class Body(msgspec.Struct):
    """One request that clients send, and its right answer."""

    path: str
    fields: dict[str, Any]
    right: Told | None = None

    @property
    def stream(self) -> bool:
        """Whether it asks for a stream."""
        return bool(self.fields.get("stream"))

    def request(self, ident: str, *, keep: bool, headers: Sequence[bytes] = ()) -> bytes:
        """Return it as HTTP. `keep`: the connection is used again; `headers`: lines beside the
        usual ones.
        """
        content = msgspec.json.encode(self.fields)
        return b"\r\n".join(
            (
                b"POST %b HTTP/1.1" % self.path.encode(),
                b"host: chaos",
                b"content-type: application/json",
                b"content-length: %d" % len(content),
                b"x-request-id: %b" % ident.encode(),
                b"connection: %b" % (b"keep-alive" if keep else b"close"),
                *headers,
                b"",
                content,
            )
        )


def bodies(seed: int, model: str, *, pictures: bool = False) -> list[Body]:
    """Return the requests of a seed, without their right answers. `pictures`: every second one
    that can have some has.
    """
    chance = random.Random(f"{seed}/bodies")
    found = [_body(number, chance, model) for number in range(BODIES)]
    able = [body for body in found if body.path != COMPLETIONS] if pictures else []
    for number, body in enumerate(able[::2]):
        _illustrate(body, [png(f"{seed}/{number}/{at}") for at in range(1 + number % 3)])
    return found


def _illustrate(body: Body, pictures: Sequence[bytes]) -> None:
    """Put pictures behind the text of a body."""
    if body.path == RESPONSES:
        parts: list[dict[str, Any]] = [{"type": "input_text", "text": body.fields["input"]}]
        parts += [{"type": "input_image", "image_url": url(one)} for one in pictures]
        body.fields["input"] = [{"role": "user", "content": parts}]
        return
    (message,) = body.fields["messages"]
    if body.path == CHAT:
        body.fields["messages"] = [asking(message["content"], *pictures)]
        return
    parts = [{"type": "text", "text": message["content"]}]
    for one in pictures:
        data = b64encode(one).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        parts.append({"type": "image", "source": source})
    body.fields["messages"] = [{"role": "user", "content": parts}]


def streams(seed: int, model: str, count: int) -> list[Body]:
    """Return requests for streams that another engine can go on with at any place, without their
    right answers.
    """
    chance = random.Random(f"{seed}/streams")
    found = []
    for number in range(count):
        text = f"stream {number} " + " ".join(chance.choices(_WORDS, k=chance.randint(2, 150)))
        fields = {"model": model, "temperature": 0, "max_tokens": 40, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        if number % 2:
            found.append(Body(CHAT, {**fields, "messages": [{"role": "user", "content": text}]}))
        else:
            found.append(Body(COMPLETIONS, {**fields, "prompt": text}))
    return found


def _body(number: int, chance: random.Random, model: str) -> Body:
    text = f"{number} " + " ".join(chance.choices(_WORDS, k=chance.randint(2, 150)))
    fields: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": chance.choice((1, 2, 5, 12, 24, 40)),
    }
    if number % 2:
        fields["stream"] = True
        if chance.random() < 0.4:
            fields["stream_options"] = {"include_usage": True}
    if chance.random() < 0.1:
        fields |= {"n": 2, "temperature": 0.8, "seed": number}
    if chance.random() < 0.15:
        fields["stop"] = ["the", " a"]
    if chance.random() < 0.15:
        fields["min_tokens"] = 2 if fields["max_tokens"] > 1 else 1
    if number % 3 == 2:
        return Body(CHAT, {**fields, "messages": [{"role": "user", "content": text}]})
    if number % 8 in (5, 6):  # each route streamed and whole
        most, asked = fields["max_tokens"], {"model": model, "temperature": 0}
        asked |= {"stream": True} if number % 2 else {}
        if (number // 8 + number) % 2:
            return Body(RESPONSES, {**asked, "input": text, "max_output_tokens": most})
        messages = [{"role": "user", "content": text}]
        return Body(MESSAGES, {**asked, "messages": messages, "max_tokens": most})
    prompt: object = text
    if chance.random() < 0.15:
        prompt = [text, "and " + text]
    return Body(COMPLETIONS, {**fields, "prompt": prompt})


async def ask_judge(network: VirtualNetwork, host: str, port: int, asked: list[Body]) -> None:
    """Have an engine alone answer all of them.

    Raises:
        MalformedError: it does not answer one as it should.
    """
    for number, body in enumerate(asked):
        transport = await network.connect(host, port)
        reader = asyncio.StreamReader()
        transport.attach(asyncio.StreamReaderProtocol(reader))
        transport.write(body.request(f"judge-{number}", keep=False))
        answer = Answer()
        await read_answer(reader, answer)
        transport.abort()
        body.right = told(answer)
        if answer.status != 200 or body.right.error is not None:
            raise MalformedError(f"the judge answers {answer.status}: {bytes(answer.body[:200])!r}")


def judge(answer: Answer, body: Body, allowed: Refusals = frozenset()) -> tuple[str, str]:
    """Judge a complete answer: `right`, `error` with its status and its reason, or `wrong` with
    what is wrong.

    `allowed`: refusals that this client caused itself.
    """
    right = body.right
    assert right is not None
    try:
        found = told(answer)
    except MalformedError as error:
        return "wrong", f"status {answer.status}: {error}"
    if answer.status != 200:
        reason = str(found.error.get("reason", "")) if found.error is not None else ""
        usual = answer.status in _ALLOWED and reason != _OWN
        caused = (answer.status, reason) in allowed or (
            reason == UNNAMED and answer.status in {status for status, _ in allowed}
        )
        if found.error is None or not (usual or caused):
            return "wrong", f"status {answer.status}: {bytes(answer.body[:200])!r}"
        if reason not in ("", UNNAMED) and not (
            answer.retry_after.isdecimal() and 1 <= int(answer.retry_after) <= _LONGEST
        ):
            return "wrong", f"status {answer.status} {reason}: Retry-After {answer.retry_after!r}"
        return "error", f"{answer.status} {reason}".rstrip()
    if found.error is not None:
        if not body.stream:
            return "wrong", "an error with status 200"
        for index, text in found.texts.items():
            if not right.texts.get(index, "").startswith(text):
                return (
                    "wrong",
                    (
                        f"before an error event, choice {index}: "
                        f"{_differ(text, right.texts.get(index, ''))}"
                    ),
                )
        return "error", f"event {found.error.get('code')}"
    if body.path == RESPONSES and _is_given_up(found, right):
        return "right", "given up by its engine"
    for index, text in right.texts.items():
        if found.texts.get(index) != text:
            return "wrong", f"choice {index}: {_differ(found.texts.get(index, ''), text)}"
    if set(found.texts) != set(right.texts):
        return "wrong", f"choices {sorted(found.texts)} instead of {sorted(right.texts)}"
    if found.ends != right.ends:
        return "wrong", f"finish reasons {found.ends} instead of {right.ends}"
    if found.usage != right.usage:
        return "wrong", f"usage {found.usage} instead of {right.usage}"
    return "right", ""


def _is_given_up(found: Told, right: Told) -> bool:
    """Return whether an engine that was terminated has ended a response half-way: that looks
    complete, and nobody can tell. No answer of a run ends before its limit.
    """
    text, whole, used = found.texts.get(0, ""), right.texts[0], found.usage
    return (
        found.ends == {0: "completed"}
        and right.ends == {0: "incomplete"}
        and len(text) < len(whole)
        and whole.startswith(text)
        and used is not None
        and right.usage is not None
        and used[:1] == right.usage[:1]
        and used[1] < right.usage[1]
    )


def _differ(text: str, right: str) -> str:
    at = next(
        (place for place, (one, two) in enumerate(zip(text, right, strict=False)) if one != two),
        None,
    )
    at = min(len(text), len(right)) if at is None else at
    return (
        f"from character {at} on {text[at : at + 40]!r} instead of {right[at : at + 40]!r}, "
        f"{len(text)} of {len(right)}"
    )
