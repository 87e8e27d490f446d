"""Merges the answers to a list of prompts, or to a batch of chats, in the order of the list.

Each prompt is one exchange. Lists are never sent whole to a prefill engine: vLLM keeps only the KV
handle of the first prompt and decodes the others with it. The merged answer is the one that a
single engine would send: choices by index, usage added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdproxy.kit.errors import AnswerBudgetError, EngineError, PdproxyError
from pdproxy.serving.access.clients import Client
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.answer_budget import BudgetShare
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Headers
from pdproxy.wire import sse
from pdproxy.wire.engine import UNREADABLE
from pdproxy.wire.fields import Fields
from pdproxy.wire.usage import add_up

MAX_USAGE = 4096
"""Bytes of a usage, all of which becomes objects. vLLM's has 200."""
MAX_REENCODED = 1 << 20
"""Bytes of an answer that is decoded and encoded again, since its form is not vLLM's: all of its
fields become objects.
"""
_FIRST = b'{"index":0,'
"""How each of vLLM's choices begins."""
_MAX_SAME_NAME = 16
"""How many fields of one name are examined, in an answer and in the objects inside it."""
_CHOICES, _USAGE = b"\0", b"\1"
"""Placeholders for choices and usage in the first answer until all answers have come: JSON never
contains these bytes.
"""


_ABSENT = msgspec.Raw(b"null")


class _Completion(msgspec.Struct, frozen=True):
    choices: msgspec.Raw
    usage: msgspec.Raw
    prompt_token_ids: msgspec.Raw = _ABSENT
    metrics: msgspec.Raw = _ABSENT


class _Choice(msgspec.Struct, frozen=True):
    index: msgspec.Raw = msgspec.Raw(b"")


_body_decoder = msgspec.json.Decoder(Fields)
_completion_decoder = msgspec.json.Decoder(_Completion)
# of one prompt: a list of millions ends with the second
_choices_decoder = msgspec.json.Decoder(tuple[_Choice])


class MergedAnswer:
    """One whole answer, merged from the prompts' answers, each of status 200. `share` counts the
    bytes that are kept of them.

    `chats`: they are those of a batch of chats, whose answer reports nothing about single prompts.
    """

    def __init__(self, share: BudgetShare, *, chats: bool = False) -> None:
        self._share = share
        self._chats = chats
        self._choices: dict[int, bytes] = {}
        self._usages: dict[int, bytes] = {}
        self._first = b""
        self._headers: Headers = []

    def __bool__(self) -> bool:
        return bool(self._choices)

    def add(self, index: int, answer: Answer) -> None:
        """Add the answer to the prompt at `index` of the list.

        Raises:
            EngineError: it is not a completion, or all answers together are too large.
        """
        try:
            self._share.grow(len(answer.body))
        except AnswerBudgetError as error:
            error.held = 0  # engines have reported what these answers have used
            raise
        try:
            found = _completion_decoder.decode(answer.body)
            (choice,) = _choices_decoder.decode(found.choices)
            self._usages[index] = _usage(found.usage)
            own = bytes(found.choices)[1:-1].strip()
            if own.startswith(_FIRST):
                own = b'{"index":%d,%b' % (index, own[len(_FIRST) :])
            else:
                own = _with(own, index=(choice.index, b"%d" % index))
            self._choices[index] = own
            if index == 0:
                changes = {"choices": (found.choices, _CHOICES), "usage": (found.usage, _USAGE)}
                if self._chats:
                    own_only = {
                        "prompt_token_ids": found.prompt_token_ids,
                        "metrics": found.metrics,
                    }
                    changes |= {
                        name: (raw, b"null")
                        for name, raw in own_only.items()
                        if bytes(raw) != b"null"
                    }
                self._first = _with(answer.body, **changes)
                self._headers = answer.headers
        except UNREADABLE as error:
            raise EngineError(f"an engine's answer is not a completion: {error!r}") from None

    def whole(self) -> Answer:
        """Return the merged answer. Call it once the answer to each prompt was added.

        Raises:
            EngineError: one of them is not a completion.
        """
        indices = sorted(self._choices)
        try:
            usages = [self._usages[index] for index in indices]
            usage = add_up(usages, details_of=None if self._chats else -1)
        except UNREADABLE as error:
            raise EngineError(f"an engine's answer is not a completion: {error!r}") from None
        choices = b"[%b]" % b",".join([self._choices[index] for index in indices])
        return Answer(
            200, self._headers, self._first.replace(_USAGE, usage).replace(_CHOICES, choices)
        )


def _usage(raw: msgspec.Raw) -> bytes:
    if memoryview(raw).nbytes > MAX_USAGE:
        raise EngineError(f"an engine's answer has a usage of more than {MAX_USAGE} bytes")
    return bytes(raw)


def _with(body: bytes, **changes: tuple[msgspec.Raw, bytes]) -> bytes:
    """Return a JSON object with some fields changed. `changes`: the old value (empty: no such
    field) and the new one, by name.

    The bytes are changed without decoding the object: an engine may have sent millions of fields.

    Raises:
        EngineError: it is large, and its form is not vLLM's.
    """
    positions = {name: _position(body, name, memoryview(old)) for name, (old, _) in changes.items()}
    if None in positions.values():
        if len(body) > MAX_REENCODED:
            raise EngineError("an engine's answer is large, and its form is not vLLM's")
        return msgspec.json.encode(
            _body_decoder.decode(body)
            | {name: msgspec.Raw(new) for name, (_, new) in changes.items()}
        )
    parts: list[bytes] = []
    at = 0
    for name, begin in sorted(positions.items(), key=lambda position: position[1] or 0):
        old, new = changes[name]
        assert begin is not None
        parts += body[at:begin], new
        at = begin + memoryview(old).nbytes
    return b"".join([*parts, body[at:]])


def _position(body: bytes, name: str, value: memoryview) -> int | None:
    """Return the position of the value of the only field with this name and value; None if there
    are several, or none.
    """
    key = b'"%b":' % name.encode()
    found = None
    at = body.find(key) if value.nbytes else -1
    for _ in range(_MAX_SAME_NAME):
        if at < 0:
            return found
        begin = at = at + len(key)
        if body.startswith(value, begin):
            if found is not None:
                return None
            found, at = begin, begin + value.nbytes
        at = body.find(key, at)
    return None


def merge_usage_events(events: Sequence[bytes]) -> bytes:
    """Return the usage event of a merged stream, from those of its streams.

    Raises:
        EngineError: one of them holds no usage.
    """
    try:
        bodies = [_body_decoder.decode(sse.payload(event)) for event in events]
        usage = add_up([_usage(body["usage"]) for body in bodies], details_of=0)
        merged = {**bodies[0], "usage": msgspec.Raw(usage)}
    except (*UNREADABLE, KeyError) as error:
        raise EngineError(f"an engine's usage event is not readable: {error!r}") from None
    return sse.data(msgspec.json.encode(merged))


class MergedStream:
    """One client stream from several engine streams. The owner of the client's output begins and
    ends that, once each.
    """

    def __init__(self, output: ResponseWriter) -> None:
        self._output = output
        self._pressure: dict[_Channel, tuple[Callable[[], None], Callable[[], None]]] = {}
        output.on_pressure(self._pause, self._resume)

    def channel(self) -> _Channel:
        """Return the output for one of the streams."""
        return _Channel(self)

    def close(self) -> None:
        """Forget the streams: they are no longer paused and resumed."""
        self._pressure.clear()

    def write(self, data: bytes) -> None:
        """Send bytes of any stream."""
        self._output.write(data)

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._output.gone

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than the engines write."""
        return self._output.paused

    @property
    def ended_by(self) -> PdproxyError | None:
        """Why the request is ended although its client is there."""
        return self._output.ended_by

    @property
    def client(self) -> Client:
        """The client whose request it is."""
        return self._output.client

    def add(self, channel: _Channel, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Pause and resume one stream's source with the others."""
        self._pressure[channel] = pause, resume

    def remove(self, channel: _Channel) -> None:
        """Forget one stream: it has ended."""
        self._pressure.pop(channel, None)

    def _pause(self) -> None:
        for pause, _ in list(self._pressure.values()):
            pause()

    def _resume(self) -> None:
        for _, resume in list(self._pressure.values()):
            resume()


class _Channel:
    """The output of one of the engine streams: it passes bytes on. The owner of the merged stream
    begins and ends the answer.
    """

    def __init__(self, stream: MergedStream) -> None:
        self._stream = stream

    begun = True

    @property
    def gone(self) -> bool:
        return self._stream.gone

    @property
    def paused(self) -> bool:
        return self._stream.paused

    @property
    def ended_by(self) -> PdproxyError | None:
        return self._stream.ended_by

    @property
    def client(self) -> Client:
        return self._stream.client

    def drop_body(self) -> None:
        """Do nothing: the owner drops the body once no prompt needs it."""

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        raise RuntimeError("one stream of several cannot answer for all")

    def begin(self, headers: Headers) -> None:
        """Do nothing: the owner begins the stream."""

    def write(self, data: bytes) -> None:
        self._stream.write(data)

    def chunk_writer(self) -> None:
        return None

    def finish(self) -> None:
        """Do nothing: the owner ends the stream once all have ended."""

    def break_off(self) -> None:
        """Do nothing: the owner breaks the stream off."""

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._stream.add(self, pause, resume)

    def close(self) -> None:
        """The stream has ended."""
        self._stream.remove(self)
