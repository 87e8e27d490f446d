"""All parts of one running proxy: how they are started, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pdproxy.app.drain import drain
from pdproxy.app.engines import EngineSetup
from pdproxy.app.front import Front
from pdproxy.app.kv_events import ReadingKvEvents
from pdproxy.app.notices import Noticing
from pdproxy.app.pool import PoolParts
from pdproxy.app.prefixes import KnowingPrefixes
from pdproxy.app.process import Process
from pdproxy.app.readiness import ReadinessCheck
from pdproxy.app.registrations import Registering
from pdproxy.app.tokens import Tokens
from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.turns import PoolTurns
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.exclusions import Exclusions
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.models import Cards, alias_card, cards_of, page
from pdproxy.fleet.prober import Prober
from pdproxy.fleet.stalls import Stalls
from pdproxy.kit.errors import PdproxyError
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.access.keys import ValidKey
from pdproxy.serving.access.models import Routes
from pdproxy.serving.access.permits import may_use, may_use_pool
from pdproxy.serving.dispatch.resources import KvTransfer
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.open_turns import OpenTurns
from pdproxy.serving.request.service import Service
from pdproxy.settings.errors import naming_pool
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.upstream.passthrough import PassthroughLegs
from pdproxy.web.guard import GuardedProtocol


@dataclass(slots=True, kw_only=True)
class Parts(Process):
    """All parts of one proxy: those of the process and of its pools. Start them inside an event
    loop, and stop them there.
    """

    pools: list[PoolParts] = field(default_factory=list)
    front: Front = field(init=False)
    readiness: ReadinessCheck = field(init=False)

    def route(self) -> None:
        """Have requests go to the pools that serve their models, by the settings of pools as they
        are now.
        """
        models = self.models
        models.changed()
        several = models.is_of_use
        services = Routes(models, [pool.service for pool in self.pools]) if several else None
        passthroughs = (
            Routes(models, [pool.passthrough for pool in self.pools]) if several else None
        )
        for pool in self.pools:
            pool.service.routes, pool.passthrough.routes = services, passthroughs

    def session_headers(self) -> list[str | None]:
        """Return the headers that name a conversation, where something needs it."""
        if len(self.pools) == 1:
            return [self.pools[0].service.session_header]
        return [pool.policy.session_header for pool in self.pools]

    async def list_models(self, authorization: bytes | None, key: ValidKey | None = None) -> bytes:
        """Return the answer to `GET /v1/models`: the models of all pools and their aliases that a
        key is good for.

        Raises:
            LimitError: the key is over one of its limits.
            UnauthorizedError: it is not valid any more.
            OverloadedError: no engine is up.
            EngineError: no engine that is up gave a list that can be read.
        """
        use = None if key is None else await self.quotas.enter(key.name)  # engines are asked
        try:
            found = await asyncio.gather(
                *(self._cards_of(pool, authorization) for pool in self.pools)
            )
        finally:
            if use is not None:
                use.end(0)
        # It may have changed while engines were asked.
        rights = None if key is None else self.credentials.keys.now(key).rights
        listed = [one for one in found if not isinstance(one, PdproxyError)]
        if not listed:
            raise next(one for one in found if isinstance(one, PdproxyError))
        cards: Cards = {}
        for pool, one in zip(self.pools, found, strict=True):
            if not isinstance(one, PdproxyError) and may_use_pool(rights, pool.name):
                for name, card in one.items():
                    if may_use(rights, name):
                        cards.setdefault(name, card)
        for at, name, real in self.models.aliases():
            own = found[at]
            if isinstance(own, PdproxyError) or real not in own:
                continue
            if may_use(rights, real) and may_use_pool(rights, self.pools[at].name):
                cards.setdefault(name, alias_card(name, own[real]))
        return page(cards)

    async def _cards_of(self, pool: PoolParts, authorization: bytes | None) -> Cards | PdproxyError:
        own_keys = self.credentials.keys.wanted
        try:
            return await cards_of(
                pool.engines, pool.admin, self.now, authorization, own_keys=own_keys
            )
        except PdproxyError as error:
            return error

    def start(self) -> None:
        """Bind the sockets for engines' messages, and start all background tasks.

        Raises:
            SettingsError: one of them can't be bound.
        """
        for at, pool in enumerate(self.pools):
            with naming_pool(at, pool.name, pools=len(self.pools)):
                pool.bind()
        self.heartbeat.start()
        if self.tracing is not None:
            self.tracing.start(self.tasks)
        self.credentials.start(self.tasks)
        for pool in self.pools:
            pool.start()

    def leave(self, connections: Iterable[object] = ()) -> None:
        """Be ready no more, and have connections of clients close behind the answers that begin
        from now on.
        """
        self.readiness.leaving = self.front.bounds.leaving = True
        for connection in connections:
            if isinstance(connection, GuardedProtocol):
                connection.leave()

    async def drain(self, requests: Collection[asyncio.Task[object]]) -> None:
        """Refuse new requests, and wait for those in flight and for the release of their KV. See
        `app.drain`.
        """
        kept = [(pool.custodian, pool.open_turns, pool.turns) for pool in self.pools]
        await drain(requests, self.admission, kept, self.settings.deadlines.drain, self.observers)

    async def stop(self) -> None:
        """End all background tasks, and drop all connections."""
        self.heartbeat.stop()
        await self.tasks.settle(0)
        for pool in self.pools:
            await pool.stop()
        await self.bodies.workers.close()
        if self.tracing is not None:
            await self.tracing.export.close()

    # -- the parts of the first pool, for those who know that there is only one; see `PoolParts`

    @property
    def ledger(self) -> Ledger:
        return self.pools[0].ledger

    @property
    def engines(self) -> EngineRegistry:
        return self.pools[0].engines

    @property
    def setup(self) -> EngineSetup:
        return self.pools[0].setup

    @property
    def membership(self) -> Membership:
        return self.pools[0].membership

    @property
    def admin(self) -> EngineAdmin:
        return self.pools[0].admin

    @property
    def prober(self) -> Prober:
        probing = self.pools[0].watching.probing
        assert probing is not None
        return probing.prober

    @property
    def stalls(self) -> Stalls:
        probing = self.pools[0].watching.probing
        assert probing is not None
        return probing.stalls

    @property
    def exclusions(self) -> Exclusions:
        probing = self.pools[0].watching.probing
        assert probing is not None
        return probing.exclusions

    @property
    def transfer(self) -> KvTransfer:
        return self.pools[0].transfer

    @property
    def buffers(self) -> ReceiveBuffers:
        return self.pools[0].buffers

    @property
    def custodian(self) -> Custodian:
        return self.pools[0].custodian

    @property
    def open_turns(self) -> OpenTurns | None:
        return self.pools[0].open_turns

    @property
    def turns(self) -> PoolTurns | None:
        return self.pools[0].turns

    @property
    def notices(self) -> Noticing:
        return self.pools[0].notices

    @property
    def registrations(self) -> Registering | None:
        return self.pools[0].registrations

    @property
    def kv_events(self) -> ReadingKvEvents | None:
        return self.pools[0].kv_events

    @property
    def prefixes(self) -> KnowingPrefixes | None:
        return self.pools[0].prefixes

    @property
    def tokens(self) -> Tokens | None:
        return self.pools[0].tokens

    @property
    def legs(self) -> PassthroughLegs:
        return self.pools[0].legs

    @property
    def service(self) -> Service:
        return self.pools[0].service
