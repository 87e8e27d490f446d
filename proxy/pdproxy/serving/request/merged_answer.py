"""A list of prompts is one exchange a prompt; this puts their answers back together, in the order of the list.

vLLM keeps only the first prompt's KV handle of a list and decodes the others on it, so lists are never sent whole to a
prefill engine. The merged answer is the one a single engine would have given: the choices by index, the usage added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdproxy.kit.errors import EngineError
from pdproxy.serving.access.clients import Client
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.answer_budget import BudgetShare
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Headers
from pdproxy.wire import sse
from pdproxy.wire.engine import UNREADABLE
from pdproxy.wire.fields import Fields
from pdproxy.wire.usage import add_up

MOST_USAGE = 4096
"""Bytes of a usage: an engine's has 200, and all of it becomes objects."""
MOST_ANEW = 1 << 20
"""Bytes of an answer that is written anew, since it is not written as vLLM writes it: all of its fields become objects."""
_FIRST = b'{"index":0,'
"""What vLLM's choices begin with."""
_SAME = 16
"""Fields of one name that are looked at, in an answer and in what it holds."""
_CHOICES, _USAGE = b"\0", b"\1"
"""What stands for both in the first answer until all are known: no JSON has these bytes."""


class _Completion(msgspec.Struct, frozen=True):
    choices: msgspec.Raw
    usage: msgspec.Raw


class _Choice(msgspec.Struct, frozen=True):
    index: msgspec.Raw = msgspec.Raw(b"")


_body_decoder = msgspec.json.Decoder(Fields)
_completion_decoder = msgspec.json.Decoder(_Completion)
_choices_decoder = msgspec.json.Decoder(tuple[_Choice])  # of one prompt: a list of millions ends with the second


class MergedAnswer:
    """One whole answer from one per prompt, each of status 200. Of each is kept what the merged one needs: `share` counts it."""

    def __init__(self, share: BudgetShare) -> None:
        self._share = share
        self._choices: dict[int, bytes] = {}
        self._usages: dict[int, bytes] = {}
        self._first = b""
        self._headers: Headers = []

    def __bool__(self) -> bool:
        return bool(self._choices)

    def add(self, index: int, answer: Answer) -> None:
        """Add the answer to the prompt at `index` of the list.

        Raises:
            EngineError: it is not a completion, or all of them are too large together.
        """
        self._share.grow(len(answer.body))
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
                self._first = _with(answer.body, choices=(found.choices, _CHOICES), usage=(found.usage, _USAGE))
                self._headers = answer.headers
        except UNREADABLE as error:
            raise EngineError(f"an engine's answer is not a completion: {error!r}") from None

    def whole(self) -> Answer:
        """Return the merged answer, once that of each prompt is there.

        Raises:
            EngineError: one of them is not a completion.
        """
        places = sorted(self._choices)
        try:
            usage = add_up([self._usages[place] for place in places], details_of=-1)
        except UNREADABLE as error:
            raise EngineError(f"an engine's answer is not a completion: {error!r}") from None
        choices = b"[%b]" % b",".join([self._choices[place] for place in places])
        return Answer(200, self._headers, self._first.replace(_USAGE, usage).replace(_CHOICES, choices))


def _usage(raw: msgspec.Raw) -> bytes:
    if memoryview(raw).nbytes > MOST_USAGE:
        raise EngineError(f"an engine's answer has a usage of more than {MOST_USAGE} bytes")
    return bytes(raw)


def _with(whole: bytes, **changes: tuple[msgspec.Raw, bytes]) -> bytes:
    """Return a JSON object with other values of some fields: by name the value that it has (empty: none), and the new one.

    The object is not made: an engine may have sent millions of fields.

    Raises:
        EngineError: it is large, and written otherwise than vLLM writes.
    """
    places = {name: _place(whole, name, memoryview(old)) for name, (old, _) in changes.items()}
    if None in places.values():
        if len(whole) > MOST_ANEW:
            raise EngineError("an engine's answer is not written as vLLM's are")
        return msgspec.json.encode(
            _body_decoder.decode(whole) | {name: msgspec.Raw(new) for name, (_, new) in changes.items()}
        )
    parts: list[bytes] = []
    at = 0
    for name, begin in sorted(places.items(), key=lambda place: place[1] or 0):
        old, new = changes[name]
        assert begin is not None
        parts += whole[at:begin], new
        at = begin + memoryview(old).nbytes
    return b"".join([*parts, whole[at:]])


def _place(whole: bytes, name: str, value: memoryview) -> int | None:
    """Return where the only field stands that has a name and a value; None if there are others, further down, or none."""
    key = b'"%b":' % name.encode()
    found = None
    at = whole.find(key) if value.nbytes else -1
    for _ in range(_SAME):
        if at < 0:
            return found
        begin = at = at + len(key)
        if whole.startswith(value, begin):
            if found is not None:
                return None
            found, at = begin, begin + value.nbytes
        at = whole.find(key, at)
    return None


def merge_usage_events(events: Sequence[bytes]) -> bytes:
    """Return the usage event of a merged stream, from those of the streams.

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
    """One client stream from several engine streams. Owns the client's output: begun once, ended once, by its owner."""

    def __init__(self, output: ResponseWriter) -> None:
        self._output = output
        self._pressure: dict[_Channel, tuple[Callable[[], None], Callable[[], None]]] = {}
        output.on_pressure(self._pause, self._resume)

    def channel(self) -> _Channel:
        """Return the output for one of the streams."""
        return _Channel(self)

    def over(self) -> None:
        """Tell the streams nothing more, and forget them."""
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
        """Whether the client reads slower than the engines write."""
        return self._output.paused

    @property
    def client(self) -> Client:
        """Whose request it is."""
        return self._output.client

    def listen(self, channel: _Channel, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Have one stream's source told of pressure."""
        self._pressure[channel] = pause, resume

    def forget(self, channel: _Channel) -> None:
        """Tell a stream that is over nothing more."""
        self._pressure.pop(channel, None)

    def _pause(self) -> None:
        for pause, _ in list(self._pressure.values()):
            pause()

    def _resume(self) -> None:
        for _, resume in list(self._pressure.values()):
            resume()


class _Channel:
    """The output of one stream of a merged one: it passes bytes, and leaves beginning and ending to the owner."""

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
    def client(self) -> Client:
        return self._stream.client

    def let_go_of_body(self) -> None:
        """The owner lets go of it once no prompt needs it."""

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        raise RuntimeError("one stream of several cannot answer for all")

    def begin(self, headers: Headers) -> None:
        """Begun already."""

    def write(self, data: bytes) -> None:
        self._stream.write(data)

    def chunk_writer(self) -> None:
        return None

    def finish(self) -> None:
        """The owner ends the stream once all are over."""

    def break_off(self) -> None:
        """The owner breaks the stream off."""

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._stream.listen(self, pause, resume)

    def over(self) -> None:
        """The stream has ended."""
        self._stream.forget(self)
