"""What several workers know of engines' prefix caches: each tells the others what it has sent to
engines. Pure.

Owns what is to be told: bounded, in batches. Keys are hashes with a secret of the process, which
forked workers have in common. A worker that starts gets what another one knows of each engine: the
newest keys, in parts.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pdproxy.scheduling.prefix.knowledge import Knowledge
from pdproxy.scheduling.prefix.prediction import Prediction
from pdproxy.scheduling.prefix.prompts import MAX_KEYS, PromptBeginning

KEPT_PARTS = 16
"""Parts of `BATCH` keys that a worker which starts is told of each engine: 128 Ki keys, 1 MiB."""
MAX_WAITING = 128 << 10
"""Keys that wait to be told: 1 MiB. A prompt that has no space is known to its own worker alone."""
BATCH = 2 * MAX_KEYS
"""Keys of a message: 64 KiB. One prompt has half as many at most."""


class SentPrompt(msgspec.Struct, array_like=True):
    """A prompt that was sent to an engine, or with `gone`: that it turned out not to hold. `keys`:
    eight bytes each.
    """

    url: str
    of_text: bool
    gone: bool
    keys: bytes


class SentBatch(msgspec.Struct, array_like=True):
    """A message. `since`: when the first of these prompts was sent, in seconds of the machine's
    clock.
    """

    since: float
    sent: list[SentPrompt]


class KeysPart(msgspec.Struct, array_like=True):
    """Keys of what was sent to an engine, the most recently used first. `of_ids`: some are of
    prompts with token ids.
    """

    of_ids: bool = False
    keys: bytes = b""


decode_part = msgspec.msgpack.Decoder(KeysPart).decode
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(SentBatch).decode


@dataclass
class WorkerKnowledge(Knowledge):
    """The `Knowledge` of one of several workers. `due` is called when there is something to tell,
    until `batch` has taken all.
    """

    due: Callable[[], None] = lambda: None
    untold: int = 0
    """Prompts that the other workers were not told of, since there was no space. Read only."""
    _waiting: deque[tuple[float, SentPrompt]] = field(default_factory=deque)
    _keys: int = 0

    def routed(
        self, beginning: PromptBeginning, url: str, now: float, *, reports: bool = True
    ) -> Prediction | None:
        """See `Knowledge`."""
        prediction = super().routed(beginning, url, now, reports=reports)
        if prediction is not None:
            self._tell(url, beginning, now, gone=False)
        return prediction

    def _lacks(self, prediction: Prediction, place: int) -> None:
        super()._lacks(prediction, place)
        self._tell(prediction.url, prediction.beginning, prediction.beginning.found_at, gone=True)

    def _tell(self, url: str, beginning: PromptBeginning, now: float, *, gone: bool) -> None:
        keys = beginning.keys.all()
        if not keys:
            return
        if self._keys + len(keys) > MAX_WAITING:
            self.untold += 1
            return
        self._keys += len(keys)
        self._waiting.append(
            (now, SentPrompt(url, beginning.of_text, gone, array("q", keys).tobytes()))
        )
        self.due()

    def batch(self) -> bytes | None:
        """Return what is to be told next, at most `BATCH` keys; None: nothing."""
        taken: list[SentPrompt] = []
        size, since = 0, 0.0
        while self._waiting and size + len(self._waiting[0][1].keys) <= 8 * BATCH:
            at, sent = self._waiting.popleft()
            since = since if taken else at
            size += len(sent.keys)
            taken.append(sent)
        self._keys -= size // 8
        return encode(SentBatch(since, taken)) if taken else None

    def take(self, sent: SentPrompt, now: float) -> int:
        """Note what another worker has sent to an engine. Return how many keys it was."""
        keys = array("q", sent.keys).tolist()
        engine = self._engines.get(sent.url)
        if engine is None:
            return len(keys)
        fed = not sent.of_text and self.is_fed(sent.url)
        if sent.gone:
            self.routing.gone(engine.place, keys)
        elif fed:
            self.speculative.routed(engine.place, [keys], now)
        else:
            self.routing.routed(engine.place, [keys])
            if not sent.of_text:
                self._by_routing.add(sent.url)
        return len(keys)

    # -- a worker that starts

    def sent_to(self) -> list[str]:
        """Return the engines of which anything was noted as routed."""
        return [
            url for url, engine in self._engines.items() if self.routing.newest(engine.place, 0, 1)
        ]

    def part(self, url: str, number: int) -> KeysPart:
        """Return a part of what was sent to an engine, none behind the last one. It takes a
        millisecond at most.

        What is sent between two parts moves the rest on: a key may be in both, and one is left out
        only if another was dropped.
        """
        engine = self._engines.get(url)
        if engine is None or number >= KEPT_PARTS:
            return KeysPart()
        keys = self.routing.newest(engine.place, number * BATCH, BATCH)
        return KeysPart(url in self._by_routing, array("q", keys).tobytes())

    def place_of(self, url: str) -> int | None:
        """Return the number of an engine's run in the indexes, None if there is no such engine."""
        engine = self._engines.get(url)
        return None if engine is None else engine.place

    def restore(self, url: str, keys: Sequence[int], *, of_ids: bool) -> None:
        """Note what another worker knew of an engine, the most recently used first, as more
        recently used than all so far.
        """
        engine = self._engines[url]
        self.routing.routed(engine.place, [keys])
        if of_ids:
            self._by_routing.add(url)
