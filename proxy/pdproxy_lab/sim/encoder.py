"""The encoder of a core, with its cache. Pure.

A picture is encoded when a step computes KV of one of its placeholders, unless the cache or the EC
connector has its output. So an engine that has all KV from elsewhere encodes nothing, except where
the last token of a prompt is a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy_lab.sim import media
from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.ec_connector import ECConnector, EncoderOutput
from pdproxy_lab.sim.request import EngineDeadError, Picture
from pdproxy_lab.sim.stats import Stats


class Encoder:
    """The encoder. Its cache is never full."""

    def __init__(self, stats: Stats, connector: ECConnector) -> None:
        self._stats, self._connector = stats, connector
        self.outputs: dict[str, EncoderOutput] = {}
        """The cache: outputs by identifier."""

    def refuses(self, one: ActiveRequest, start: int, end: int) -> bool:
        """Return whether a picture between two places of a prompt has the identifier of one with
        another size, as with a `uuid` that was used twice. vLLM fails such a request.
        """
        wanted = [medium.picture for medium in one.request.media if medium.places(start, end)]
        rows: dict[str, int] = {}
        for picture in wanted:
            known = self.outputs.get(picture.identifier)
            usual = rows.setdefault(picture.identifier, known.rows if known else picture.length)
            if usual != picture.length:
                return True
        return False

    def run(self, one: ActiveRequest, start: int, end: int) -> None:
        """Have the outputs of the pictures between two places of a prompt.

        Raises:
            EngineDeadError: there is nothing to encode, or the connector's output can't be used.
        """
        for index, medium in enumerate(one.request.media):
            if medium.places(start, end):
                output = self._output(medium.picture)
                self._connector.produced(one, index, output)

    def seen(self, one: ActiveRequest, start: int, end: int) -> Sequence[int]:
        """Return a request's tokens as attention reads those between two places: placeholders there
        have the content of their pictures.

        Raises:
            EngineDeadError: as `run`.
        """
        self.run(one, start, end)
        wanted = [medium for medium in one.request.media if medium.places(start, end)]
        if not wanted:
            return one.tokens
        found = list(one.tokens)
        for medium in wanted:
            media.write(found, medium, self.outputs[medium.picture.identifier].content)
        return found

    def _output(self, picture: Picture) -> EncoderOutput:
        identifier = picture.identifier
        if identifier not in self.outputs:
            self.outputs[identifier] = EncoderOutput(self._content(picture), picture.length)
        return self.outputs[identifier]

    def _content(self, picture: Picture) -> int:
        if self._connector.has(picture.identifier):
            found = self._connector.load(picture.identifier)
            if found is None:
                return 0
            if found.rows < picture.length:
                raise EngineDeadError
            self._stats.encoder_outputs_loaded += 1
            return found.content
        if picture.content is None:
            raise EngineDeadError
        self._stats.encoder_inputs += 1
        output = EncoderOutput(picture.content, picture.length)
        self._connector.encoded(picture.identifier, output)
        return picture.content
