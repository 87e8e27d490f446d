"""Answers of engines to questions that one of several workers asks for all: it sends them to the
others.

Owns, for one kind of question, the last answer of each engine's present run. A worker that has none
asks the others again and again, and the process that leads (`kit.leading`) sends what it has. One
that leads in place of a dead one asks the engines again. An answer counts only for the run that
gave it, which its start time shows. What any worker finds of an engine by itself, its notes, goes
to all, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.leading import Lead
from pdproxy.kit.tasks import TaskOwner

ASK_EVERY = 1.0
"""Seconds until a worker asks again for answers that it lacks."""


class _Said(msgspec.Struct, array_like=True):
    """What is known of one run of an engine. `started`: when that run began, as the engine reports
    it.
    """

    url: str
    started: float
    body: bytes


class _Told(msgspec.Struct, array_like=True):
    """A message. `lacking`: engines of which its sender has no answer."""

    answers: list[_Said] = []
    notes: list[_Said] = []
    lacking: list[str] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Told).decode


class WorkerAnswers:
    """The answers to one kind of question. `tell` sends a message to all other workers. A watcher
    of engines.
    """

    def __init__(self, lead: Lead, tell: Callable[[bytes], None], engines: EngineRegistry) -> None:
        self.lead = lead
        self._tell = tell
        self._engines = engines
        self._kept: dict[str, tuple[int, bytes]] = {}
        """By URL, with the number of the run."""
        self.taken: Callable[[Engine], None] = lambda engine: None
        """Called when an engine's answer has come from another worker."""
        self.noted: Callable[[Engine, bytes], None] = lambda engine, note: None
        """Called with what another worker has noted of an engine."""
        self.replaced: Callable[[Engine, bytes], None] = lambda engine, before: None
        """Called with what was kept of an engine, when another answer was kept in its place."""
        self.lacking: Callable[[], Collection[str]] = tuple
        """Returns the engines whose answers are needed here."""
        engines.watch(self)

    def __repr__(self) -> str:
        return f"<SharedAnswers of {len(self._kept)} engines>"

    def start(self, tasks: TaskOwner) -> None:
        """Ask for what is lacking, in a task of this owner. Needs a running event loop."""
        tasks.keep(self._ask, "answers of engines")

    async def _ask(self) -> None:
        while True:
            if not self.lead.leads and (lacking := self.lacking()):
                self._tell(_encode(_Told(lacking=[*lacking])))
            await asyncio.sleep(ASK_EVERY)

    def added(self, engine: Engine) -> None:
        """Nothing is known of it yet."""

    def removed(self, engine: Engine) -> None:
        """Forget an engine."""
        if engine.url != self._engines.replaced:
            self._kept.pop(engine.url, None)

    def of(self, engine: Engine) -> bytes | None:
        """Return the answer of an engine's present run, None if there is none."""
        run, body = self._kept.get(engine.url, (None, None))
        return body if run == engine.in_ledger.run_number else None

    def keep(self, engine: Engine, body: bytes) -> None:
        """Keep an engine's answer, or what has become of it, for a worker that lacks it."""
        self._kept[engine.url] = engine.in_ledger.run_number, body

    def tell(self, engine: Engine, body: bytes) -> None:
        """Keep what an engine has answered to this worker, and send it to the others."""
        self.keep(engine, body)
        if engine.in_ledger.evidence is not None:
            self._tell(_encode(_Told([_Said(engine.url, engine.in_ledger.evidence.started, body)])))

    def note(self, engine: Engine, note: bytes) -> None:
        """Send the others what this worker has found of an engine by itself."""
        if engine.in_ledger.evidence is not None:
            self._tell(
                _encode(_Told(notes=[_Said(engine.url, engine.in_ledger.evidence.started, note)]))
            )

    def received(self, body: bytes) -> None:
        """Take what another worker has sent."""
        told = _decode(body)
        for said in told.answers:
            if (engine := self._of_run(said)) is not None:
                before = self.of(engine)
                self.keep(engine, said.body)
                if before is not None:
                    self.replaced(engine, before)
                self.taken(engine)
        for said in told.notes:
            if (engine := self._of_run(said)) is not None:
                self.noted(engine, said.body)
        if self.lead.leads:
            for url in told.lacking:
                if (engine := self._engines.get(url)) is not None and (
                    kept := self.of(engine)
                ) is not None:
                    self.tell(engine, kept)

    def _of_run(self, said: _Said) -> Engine | None:
        engine = self._engines.get(said.url)
        if (
            engine is None
            or engine.in_ledger.evidence is None
            or engine.in_ledger.evidence.started != said.started
        ):
            return None  # it is not here yet, or has started again: what is lacking is asked for
        return engine
