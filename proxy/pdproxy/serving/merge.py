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
from pdproxy.wire import sse
from pdproxy.wire.request import Fields
from pdproxy.wire.usage import add_up

_body_decoder = msgspec.json.Decoder(Fields)
_choices_decoder = msgspec.json.Decoder(list[Fields])


def merge_answers(answers: Sequence[Answer]) -> Answer:
    """Return one whole answer from one a prompt, all of status 200.

    Raises:
        EngineError: one of them is not a completion.
    """
    try:
        bodies = [_body_decoder.decode(answer.body) for answer in answers]
        choices: list[Fields] = []
        for index, body in enumerate(bodies):
            choices += [
                {**own, "index": msgspec.Raw(b"%d" % index)} for own in _choices_decoder.decode(body["choices"])
            ]
        merged = dict(bodies[0])
        merged["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        merged["usage"] = msgspec.Raw(add_up([bytes(body["usage"]) for body in bodies], details_of=-1))
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise EngineError(f"an engine's answer is not a completion: {error!r}") from None
    return Answer(200, answers[0].headers, msgspec.json.encode(merged))


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
        self._pressure: list[tuple[Callable[[], None], Callable[[], None]]] = []
        output.on_pressure(self._pause, self._resume)

    def channel(self) -> Output:
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

    def listen(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Have one stream's source told of pressure."""
        self._pressure.append((pause, resume))

    def _pause(self) -> None:
        for pause, _ in self._pressure:
            pause()

    def _resume(self) -> None:
        for _, resume in self._pressure:
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
        self._stream.listen(pause, resume)
