"""What is known of all engines of a pool, and which of them may serve what.

Here no engine is chosen, and no load is leased: the ledger does both. What serves requests reads
these states, and asks `scheduling.scheduler` for engines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pdproxy.scheduling import readiness
from pdproxy.scheduling.ledger_engine import DECODE, ENCODE, LedgerEngine, Role, in_common
from pdproxy.scheduling.releasing import ReleaserChoice


class EngineStates:
    """The engines of one pool. `alone`: the roles whose engines may serve a request by themselves,
    the first choice first.
    """

    releasing: ReleaserChoice
    """Through which engines KV is released. Set once, when the rest of the pool's choices is."""

    def __init__(self, alone: Sequence[Role]) -> None:
        self._alone = tuple(alone)
        self.alone_up_to: int | None = None
        """How many tokens a prompt may have that an engine of role decode serves whole; None: any
        number.
        """
        self._engines: dict[str, LedgerEngine] = {}
        self._starting = True
        """Until every engine has been probed once. Engines that are added later don't count."""
        self._encoders: list[LedgerEngine] = []
        """Those that encode media for others."""
        self.block_size: int | None = None
        """The smallest KV block of any engine in tokens, None while unknown. Read only."""
        self.caching = False
        """Whether a prompt that comes again finds its KV at each engine that decodes for others.
        Read only.
        """
        self.template_tokens = 0
        """The largest number of tokens that an engine's chat template adds to one message. Read
        only.
        """
        self.adapters: frozenset[str] = frozenset()
        """The LoRA adapters among the engines' models. Read only."""
        self.needs_details = False
        """Whether what chooses engines reads the details of an `Ask`. Read only."""
        self.has_placement = False
        """Whether a placement decides for each prompt whether it is split. Read only."""
        self._when_lost: Callable[[str], None] = lambda _: None
        self._when_up: Callable[[str, bool], None] = lambda _, __: None
        self._when_changed: list[Callable[[], None]] = []

    @property
    def engines(self) -> tuple[LedgerEngine, ...]:
        """All engines, in the order of the settings. Read only."""
        return tuple(self._engines.values())

    def get(self, url: str) -> LedgerEngine | None:
        """Return an engine, None if there is none of this URL."""
        return self._engines.get(url)

    def when_lost(self, then: Callable[[str], None]) -> None:
        """Call `then(url)` when the present run of an engine is over, or seems to be: it went down,
        or was started again.
        """
        self._when_lost = then

    def when_up(self, then: Callable[[str, bool], None]) -> None:
        """Call `then(url, restarted)` when an engine's run is up: the first one since it was added,
        or another one.
        """
        self._when_up = then

    def when_changed(self, then: Callable[[], None]) -> None:
        """Call `then()` when other engines may serve requests than before."""
        self._when_changed.append(then)

    # -- who may serve what

    def serves_alone(self, model: str | None, *, spares_decode: bool) -> bool:
        """Return whether any engine can serve a request for a model whole. `spares_decode`: not
        those of role decode.
        """
        return any(
            engine.available
            and not engine.uses.isdisjoint(self._alone)
            and not (spares_decode and engine.role is DECODE)
            and (model is None or engine.serves(model))
            for engine in self._engines.values()
        )

    def lists(self, model: str, without: Collection[str]) -> bool:
        """Return whether an engine outside of `without` that can answer clients lists a model."""
        return any(
            engine.available
            and engine.serves(model)
            and not engine.for_others
            and engine.url not in without
            for engine in self._engines.values()
        )

    def decodes(self, model: str | None) -> bool:
        """Return whether an engine of role decode is up that serves a model."""
        return any(
            n.role is DECODE and n.available and (model is None or n.serves(model))
            for n in self._engines.values()
        )

    def may_return(self, model: str | None) -> bool:
        """Return whether a request could be served, if the engines moved again that stand still."""
        return readiness.may_return(self.engines, model, alone=self._alone)

    def other_decodes(self, url: str) -> list[str]:
        """Return the URLs of all decode engines but one."""
        return [
            engine.url
            for engine in self._engines.values()
            if DECODE in engine.uses and engine.url != url
        ]

    @property
    def has_encoders(self) -> bool:
        """Whether there are engines that encode media for others, up or not."""
        return bool(self._encoders)

    def other_encoders(self, url: str) -> list[str]:
        """Return the URLs of the encoder engines that belong to another revision than an engine
        does, if one is up that does not.
        """
        engine = self._engines.get(url)
        if engine is None or engine.revision is None:
            return []
        others = [one for one in self._encoders if one.revision not in (None, engine.revision)]
        rest = [one for one in self._encoders if one not in others]
        return [one.url for one in others] if any(one.available for one in rest) else []

    def _changed(self) -> None:
        """Forget all that was computed from the engines' state."""
        engines = self._engines.values()
        self._encoders = [engine for engine in engines if engine.role is ENCODE]
        self._starting = self._starting and not (
            engines and all(engine.probed for engine in engines)
        )
        self.block_size, self.adapters, self.template_tokens, self.caching = in_common(engines)
        for then in self._when_changed:
            then()

    # -- what an operator asks

    def not_ready(self) -> str | None:
        """Return why no request could be served, None if one could."""
        alone = [role for role in self._alone if role is not DECODE or self.alone_up_to != 0]
        return readiness.not_ready(self.engines, starting=self._starting, alone=alone)

    def why_degraded(self, now: float) -> str | None:
        """Return why no prompt can be split although the pool has prefill engines, None if one can
        be.
        """
        why = readiness.why_degraded(self.engines, now)
        return (
            why
            if why is None or self.alone_up_to is None
            else f"{why}, if the pool's setting `alone` allows it"
        )
