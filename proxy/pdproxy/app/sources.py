"""The engines of a proxy's settings while it runs: those that stand there, and those that sources
find.

Owns which sources are followed. A process that does not decide who is a member follows none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pdproxy.app.parts import Parts
from pdproxy.app.pool import PoolParts
from pdproxy.fleet.informer import KINDS, REASONS, Counts
from pdproxy.fleet.kubernetes_source import KubernetesSource
from pdproxy.fleet.member import MembershipError
from pdproxy.fleet.membership import ADMIN, SETTINGS
from pdproxy.fleet.sources import EngineSource, FoundEngines, SourceAnswer, source_of
from pdproxy.observe.description import Description, Label, MergeRule, Samples, counter, gauge
from pdproxy.settings.engines import ConfiguredEngine, both_schemes
from pdproxy.settings.errors import naming_pool
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings

logger = logging.getLogger("pdproxy.settings")

Key = tuple[int, str]
"""The number of a pool, and the URL of a source."""
Make = Callable[[str, Settings], EngineSource]
RESULTS = (
    ("changed", "it names other engines than before"),
    ("same", "it names the same engines"),
    ("empty", "it names no engine"),
    ("failed", "there was no answer that can be used: the last one stays in use"),
)


_SOURCE = Label("source", text="the URL that names engines, as in the settings")


def _of_source(
    name: str, answers: str, engines: str, age: str
) -> tuple[Description, Description, Description]:
    return (
        counter(
            f"pdproxy_{name}_answers_total", "answers", answers, _SOURCE, Label("result", RESULTS)
        ),
        gauge(f"pdproxy_{name}_engines", "engines", engines, _SOURCE, workers=MergeRule.MOST),
        gauge(f"pdproxy_{name}_age_seconds", "seconds", age, _SOURCE, workers=MergeRule.MOST),
    )


METRICS = {
    None: _of_source(
        "source",
        "Answers of sources of engines, such as DNS",
        "Engines that a source names",
        "Time since the last good answer of a source",
    ),
    "dns": _of_source(
        "dns",
        "Answers of DNS about the names of engines (dns:// and srv://)",
        "Engines that a name stands for",
        "Time since the last good answer about a name",
    ),
    "kubernetes": _of_source(
        "kubernetes",
        "Answers about pods as engines (pods:// and inferencepool://)",
        "Engines that pods have",
        "Time since the API server has last shown which pods there are",
    ),
}
"""The metrics of sources, by their kind. None: of all kinds."""
LEFT_OUT = gauge(
    "pdproxy_source_left_out",
    "engines",
    "What a source has found that is no engine here: /ready says why",
    _SOURCE,
    workers=MergeRule.MOST,
)
EVENTS = counter(
    "pdproxy_kubernetes_events_total",
    "events",
    "Events of watches of the Kubernetes API",
    _SOURCE,
    Label("type", tuple((name, f"{kind} in the API") for kind, name in KINDS.items())),
)
LISTS = counter(
    "pdproxy_kubernetes_lists_total",
    "lists",
    "Lists of all pods, or of an InferencePool",
    _SOURCE,
    Label("reason", REASONS),
)


class _New(NamedTuple):
    at: int
    engine: ConfiguredEngine
    source: EngineSource


class _Followed(NamedTuple):
    engines: FoundEngines
    source: EngineSource
    task: asyncio.Task[None]


class Sources:
    """What the pools of a proxy follow. `make`: makes a source of its URL and the settings."""

    def __init__(self, proxy: Parts) -> None:
        self.make: Make = source_of
        self._proxy = proxy
        self._fixed = [pool.fixed_nodes for pool in proxy.settings.pools]
        """The engines that stand in the settings, by pool."""
        self._followed: dict[Key, _Followed] = {}
        self._is_shown = False
        self.when_found: Callable[[], None] = lambda: None
        """Called behind each answer of a source."""
        self._half_applied = False
        """Whether the last change failed: what could not be put back is had again with the next
        one, also the same.
        """

    def __repr__(self) -> str:
        return f"<Sources {', '.join(one.name for one in self.found)}>"

    @property
    def found(self) -> list[FoundEngines]:
        """What sources find, one for each that is followed."""
        return [one.engines for one in self._followed.values()]

    def why_starting(self) -> str | None:
        """Return which source has never been answered, if no engine is known at all; else None."""
        if any(pool.membership.members for pool in self._proxy.pools):
            return None
        waits = (one for one in self.found if one.answered_at is None)
        return next((f"starting: {one.name} has not been answered yet" for one in waits), None)

    def start(self) -> None:
        """Follow the sources of the settings. Their first engines serve at once, as those do that
        stand in the settings.

        Raises:
            SettingsError: a source can't be made.
        """
        if not self._proxy.share.chooses:
            return
        self._follow(self._made(self._proxy.settings.pools), are_new=False)

    def use(self, pools: Sequence[Pool]) -> None:
        """Have the engines of these pools' settings, and follow their sources and no others. What
        fails changes nothing.

        Engines of a source that is given up are drained and removed.

        Raises:
            SettingsError: an engine can't work in its pool, or a source can't be made.
            MembershipError: as there.
        """
        if not self._proxy.share.chooses:
            return
        put_back: list[tuple[str, Callable[[], None]]] = []
        try:
            for at, pool in enumerate(pools):
                with naming_pool(at, pool.name, pools=len(pools)):
                    self._change(at, pool, put_back)
            new = self._made(pools)
        except Exception:
            self._half_applied = True
            for otherwise, undo in reversed(put_back):
                try:
                    undo()
                except (ValueError, MembershipError) as error:
                    # a key file was deleted meanwhile, for example
                    logger.error("%s: %s", otherwise, error)  # noqa: TRY400
            raise
        self._half_applied = False
        wanted = {(at, engine.url) for at, pool in enumerate(pools) for engine in pool.source_nodes}
        for key in [key for key in self._followed if key not in wanted]:  # from here nothing fails
            engines, _, task = self._followed.pop(key)
            self._proxy.tasks.end(task)
            engines.give_up()
        self._follow(new, are_new=True)

    def take_over(self) -> None:
        """Have what the settings and the sources that are followed want, and what operators do. A
        process before this one may have had other settings.
        """
        for at, parts in enumerate(self._proxy.pools):
            try:
                self._have_fixed(at, self._fixed[at])
            except (ValueError, MembershipError) as error:
                logger.error("pool %s keeps its engines: %s", parts.name, error)  # noqa: TRY400
            members = parts.membership.members.values()
            sources = {source for one in members for source in (one.source, *one.heirs)}
            for source in sources - {SETTINGS, ADMIN}:
                if (at, source) not in self._followed:
                    parts.membership.apply(source, ())

    def _change(self, at: int, pool: Pool, put_back: list[tuple[str, Callable[[], None]]]) -> None:
        """Have other engines and other settings of a pool's sources. What undoes it is added to
        `put_back`.

        With each: what is so if that fails.
        """
        fixed = self._fixed[at]
        if pool.fixed_nodes != fixed or self._half_applied:
            self._have_fixed(at, pool.fixed_nodes)
            put_back.append(
                (f"pool {pool.name} keeps its new engines", partial(self._have_fixed, at, fixed))
            )
        for engine in pool.source_nodes:
            one = self._followed.get((at, engine.url))
            if one is not None and (one.engines.template != engine or self._half_applied):
                before = one.engines.template
                one.engines.use(engine)
                put_back.append(
                    (f"{engine.url} keeps its new settings", partial(one.engines.use, before))
                )

    def _have_fixed(self, at: int, ledger_engines: tuple[ConfiguredEngine, ...]) -> None:
        self._proxy.pools[at].membership.apply(SETTINGS, ledger_engines)
        self._fixed[at] = ledger_engines

    def _made(self, pools: Sequence[Pool]) -> list[_New]:
        """Make the sources of these pools that are not followed yet."""
        ledger_engines = [
            (at, engine) for at, pool in enumerate(pools) for engine in pool.source_nodes
        ]
        new = [
            (at, engine) for at, engine in ledger_engines if (at, engine.url) not in self._followed
        ]
        return [_New(at, engine, self.make(engine.url, self._proxy.settings)) for at, engine in new]

    def _follow(self, new: Sequence[_New], *, are_new: bool) -> None:
        """Follow these. `are_new`: their first engines begin slowly."""
        proxy = self._proxy
        for at, engine, source in new:
            parts = proxy.pools[at]
            elsewhere = partial(
                _pool_of, pools=[other for other in proxy.pools if other is not parts]
            )
            engines = FoundEngines(
                engine, parts.membership, proxy.observers, proxy.now, elsewhere, are_new=are_new
            )
            task = proxy.tasks.keep(
                partial(source.run, partial(self._answered, engines)), engines.name
            )
            self._followed[at, engine.url] = _Followed(engines, source, task)
        if self._followed and not self._is_shown:
            self._is_shown = True
            proxy.readiness.why_starting = self.why_starting
            proxy.readiness.show(
                lambda: [text for one in self.found for text in one.shortcomings()]
            )
            for kind in METRICS:
                self._show(kind)
            self._show_informers()

    def _answered(self, engines: FoundEngines, answer: SourceAnswer) -> None:
        try:
            engines.answered(answer)
        finally:
            self.when_found()

    def _show(self, kind: str | None) -> None:
        """Show the metrics of the sources of one kind. None: of all."""
        show, now = self._proxy.observers.show, self._proxy.now

        def found() -> list[FoundEngines]:
            return [one for one in self.found if kind in (None, one.kind)]

        def ages() -> Samples:
            return [
                ((one.name,), now() - one.answered_at)
                for one in found()
                if one.answered_at is not None
            ]

        answers, engines, age = METRICS[kind]
        show(
            answers,
            lambda: [((one.name, how), one.counts[how]) for one in found() for how, _ in RESULTS],
        )
        show(engines, lambda: [((one.name,), one.count) for one in found()])
        show(age, ages)

    def _show_informers(self) -> None:
        """Show what sources leave out, and how pods are followed."""
        show = self._proxy.observers.show

        def followed() -> list[tuple[str, Counts]]:
            return [
                (one.engines.name, one.source.counts)
                for one in self._followed.values()
                if isinstance(one.source, KubernetesSource)
            ]

        show(LEFT_OUT, lambda: [((one.name,), one.left_out) for one in self.found])
        show(
            EVENTS,
            lambda: [
                ((name, kind), counts.events[kind])
                for name, counts in followed()
                for kind in KINDS.values()
            ],
        )
        show(
            LISTS,
            lambda: [
                ((name, why), counts.lists[why])
                for name, counts in followed()
                for why, _ in REASONS
            ],
        )


def _pool_of(url: str, pools: Sequence[PoolParts]) -> str | None:
    """Return the name of the pool that an engine is in, with or without TLS; None if it is in none
    of these.
    """
    spelled = both_schemes(url)
    return next(
        (pool.name for pool in pools if any(one in pool.membership.members for one in spelled)),
        None,
    )
