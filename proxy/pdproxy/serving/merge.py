"""A list of prompts is one exchange a prompt; this puts their answers back together, in the order of the list.

vLLM keeps only the first prompt's KV handle of a list and decodes the others on it, so lists are never sent whole to a
prefill engine. The merged answer is the one a single engine would have given: the choices by index, the usage added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdproxy.kit.errors import EngineError
from pdproxy.serving.clients import Client
from pdproxy.serving.output import Output
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Headers
from pdproxy.upstream.room import Share
from pdproxy.wire import sse
from pdproxy.wire.fields import Fields
from pdproxy.wire.usage import add_up

_body_decoder = msgspec.json.Decoder(Fields)
_choices_decoder = msgspec.json.Decoder(list[Fields])


class MergedAnswer:
    """One whole answer from one per prompt, each of status 200. Of each is kept what the merged one needs: `share` counts it."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._choices: dict[int, bytes] = {}
        self._usages: dict[int, bytes] = {}
        self._first: Fields = {}
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
            body = _body_decoder.decode(answer.body)
            choices = [
                {**own, "index": msgspec.Raw(b"%d" % index)} for own in _choices_decoder.decode(body.pop("choices"))
            ]
            self._usages[index] = bytes(body.pop("usage"))
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
            raise EngineError(f"an engine's answer is not a completion: {error!r}") from None
        self._choices[index] = msgspec.json.encode(choices)[1:-1]
        if index == 0:
            self._first, self._headers = _body_decoder.decode(answer.body), answer.headers

    def whole(self) -> Answer:
        """Return the merged answer, once that of each prompt is there.

        Raises:
            EngineError: one of them is not a completion.
        """
        places = sorted(self._choices)
        try:
            usage = add_up([self._usages[place] for place in places], details_of=-1)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineError(f"an engine's answer is not a completion: {error!r}") from None
        choices = b"[%b]" % b",".join(filter(None, (self._choices[place] for place in places)))
        merged = {**self._first, "choices": msgspec.Raw(choices), "usage": msgspec.Raw(usage)}
        return Answer(200, self._headers, msgspec.json.encode(merged))


def merge_usage_events(events: Sequence[bytes]) -> bytes:
    """Return the usage event of a merged stream, from those of the streams.

    Raises:
        EngineError: one of them holds no usage.
    """
    try:
        bodies = [_body_decoder.decode(sse.payload(event)) for event in events]
        usage = add_up([bytes(body["usage"]) for body in bodies], details_of=0)
        merged = {**bodies[0], "usage": msgspec.Raw(usage)}
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise EngineError(f"an engine's usage event is not readable: {error!r}") from None
    return sse.data(msgspec.json.encode(merged))


class MergedStream:
    """One client stream from several engine streams. Owns the client's output: begun once, ended once, by its owner."""

    def __init__(self, output: Output) -> None:
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
