"""Wiring of the engines that DNS names: a source for each name of the settings, while the proxy runs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pdproxy.app.parts import Parts
from pdproxy.app.pool import PoolParts
from pdproxy.fleet.dns_source import DnsSource, LookUp
from pdproxy.observe.description import Label, Rule, Samples, counter, gauge
from pdproxy.observe.events import Observers
from pdproxy.settings.dns import dns_name
from pdproxy.settings.engines import Node, both_schemes
from pdproxy.settings.pools import Pool
from pdproxy.upstream.resolver import Resolver

logger = logging.getLogger("pdproxy.dns")

Key = tuple[int, str]
"""The number of a pool, and the URL of a name."""
DNS_RESULTS = (
    ("changed", "it names other engines than before"),
    ("same", "it names the same engines"),
    ("empty", "it names no engine"),
    ("failed", "there was no answer that can be used: the last one stays in use"),
)
_DNS_NAME = Label("source", text="the URL that names engines, as in the settings")
DNS_ANSWERS = counter(
    "pdproxy_dns_answers_total",
    "answers",
    "Answers of DNS about the names of engines (dns:// and srv://)",
    _DNS_NAME,
    Label("result", DNS_RESULTS),
)
DNS_ENGINES = gauge(
    "pdproxy_dns_engines",
    "engines",
    "Engines that a name stands for",
    _DNS_NAME,
    workers=Rule.MOST,
)
DNS_AGE = gauge(
    "pdproxy_dns_age_seconds",
    "seconds",
    "Time since the last good answer about a name",
    _DNS_NAME,
    workers=Rule.MOST,
)


class _Followed(NamedTuple):
    source: DnsSource
    task: asyncio.Task[None]


class Names:
    """The names that a proxy's pools follow. `look_up` None: the settings' servers; `chance`: from 0 to 1."""

    def __init__(
        self, proxy: Parts, look_up: LookUp | None = None, chance: Callable[[], float] = random.random
    ) -> None:
        self._proxy = proxy
        self._look_up = look_up or Resolver(proxy.settings.dns, proxy.settings.engines.allowed).look_up
        self._chance = chance
        self._followed: dict[Key, _Followed] = {}
        self._is_shown = False

    def __repr__(self) -> str:
        return f"<Names {', '.join(source.name for source in self.sources)}>"

    @property
    def sources(self) -> list[DnsSource]:
        """The sources of the names that are followed."""
        return [one.source for one in self._followed.values()]

    def use(self, pools: Sequence[Pool], *, are_new: bool = True) -> None:
        """Follow the names of these pools' settings, and no others. What fails changes nothing.

        Engines of a name that is given up are drained and removed. `are_new`: those of names that are new begin slowly.

        Raises:
            SettingsError: an engine can't work with its name's new settings.
            MembershipError: as there.
        """
        wanted = {(at, node.url): node for at, pool in enumerate(pools) for node in pool.dns_nodes}
        self._change({key: node for key, node in wanted.items() if key in self._followed})
        for key in [key for key in self._followed if key not in wanted]:  # from here nothing fails
            source, task = self._followed.pop(key)
            self._proxy.tasks.end(task)
            source.give_up()
        for key, node in wanted.items():
            if key not in self._followed:
                self._follow(key, node, are_new=are_new)
        if wanted and not self._is_shown:
            self._is_shown = True
            self._proxy.readiness.show(self._shortcomings)
            _show(self._proxy.observers, self, self._proxy.now)

    def _change(self, nodes: Mapping[Key, Node]) -> None:
        done: list[tuple[DnsSource, Node]] = []
        try:
            for key, node in nodes.items():
                source = self._followed[key].source
                if source.template != node:
                    before = source.template
                    source.use(node)
                    done.append((source, before))
        except Exception:
            for source, before in reversed(done):
                try:
                    source.use(before)
                except Exception as error:  # its key file was deleted, for example: its engines serve on
                    logger.error("%s keeps its new settings: %s", source.name, error)  # noqa: TRY400
            raise

    def _follow(self, key: Key, node: Node, *, are_new: bool) -> None:
        proxy, pool = self._proxy, self._proxy.pools[key[0]]

        def elsewhere(url: str) -> str | None:
            return _pool_of(url, [other for other in proxy.pools if other is not pool])

        source = DnsSource(
            node,
            dns_name(node.url, ("url",)),
            self._look_up,
            pool.membership,
            proxy.observers,
            proxy.settings.dns,
            proxy.now,
            self._chance,
            elsewhere,
            are_new=are_new,
        )
        self._followed[key] = _Followed(source, proxy.tasks.keep(source.run, source.name))

    def _shortcomings(self) -> list[str]:
        return [text for source in self.sources for text in source.shortcomings()]


def follow_names(proxy: Parts, look_up: LookUp | None = None, chance: Callable[[], float] = random.random) -> Names:
    """Have the engines of a proxy that was started follow the names of its settings. For the arguments see `Names`."""
    names = Names(proxy, look_up, chance)
    names.use(proxy.settings.pools, are_new=False)
    return names


def _pool_of(url: str, pools: Sequence[PoolParts]) -> str | None:
    """Return the name of the pool that an engine is in, with or without TLS; None if it is in none of these."""
    spelled = both_schemes(url)
    return next((pool.name for pool in pools if any(one in pool.membership.members for one in spelled)), None)


def _show(observers: Observers, names: Names, now: Callable[[], float]) -> None:
    def answers() -> Samples:
        return [((one.name, how), one.counts[how]) for one in names.sources for how, _ in DNS_RESULTS]

    def ages() -> Samples:
        return [((one.name,), now() - one.answered_at) for one in names.sources if one.answered_at is not None]

    observers.show(DNS_ANSWERS, answers)
    observers.show(DNS_ENGINES, lambda: [((one.name,), len(one.urls())) for one in names.sources])
    observers.show(DNS_AGE, ages)
