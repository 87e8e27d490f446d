"""All parts of one running proxy: how they are started, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from pdproxy.app.credentials import Credentials
from pdproxy.app.drain import drain
from pdproxy.app.engines import EngineSetup
from pdproxy.app.front import Front
from pdproxy.app.heartbeat import Heartbeat
from pdproxy.app.kv_events import ReadingKvEvents
from pdproxy.app.notices import Noticing
from pdproxy.app.prefixes import KnowingPrefixes
from pdproxy.app.readiness import ReadinessCheck
from pdproxy.app.registrations import Registering
from pdproxy.app.tokens import Tokens
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.exclusions import Exclusions
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.prober import Prober
from pdproxy.fleet.stalls import Stalls
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.observe.metrics import Metrics
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.dispatch.resources import KvTransfer
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.turns import Turns
from pdproxy.serving.request.admission import Admission
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.serving.request.service import Service
from pdproxy.settings.schema import Settings
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.passthrough import PassthroughLegs
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connections import Connections
from pdproxy.web.unread_answers import UnreadAnswers


@dataclass(slots=True, kw_only=True)
class Parts:
    """All parts of one proxy. Start them inside an event loop, and stop them there."""

    settings: Settings
    credentials: Credentials
    ledger: Ledger
    engines: EngineRegistry
    setup: EngineSetup
    membership: Membership
    admin: EngineAdmin
    prober: Prober
    stalls: Stalls
    exclusions: Exclusions
    transfer: KvTransfer
    custodian: Custodian
    turns: Turns | None
    notices: Noticing
    registrations: Registering | None
    kv_events: ReadingKvEvents | None
    prefixes: KnowingPrefixes | None
    tokens: Tokens | None
    known_clients: Clients
    admission: Admission
    bodies: BodyReader
    service: Service
    legs: PassthroughLegs
    front: Front
    body_budget: BodyBudget
    answer_budget: AnswerBudget
    unread_answers: UnreadAnswers
    connections: Connections
    readiness: ReadinessCheck
    metrics: Metrics
    observers: Observers
    tasks: TaskOwner
    heartbeat: Heartbeat

    def start(self) -> None:
        """Bind the sockets for engines' messages, and start all background tasks.

        Raises:
            SettingsError: one of them can't be bound.
        """
        self.notices.start()
        if self.registrations is not None:
            self.registrations.start()
        if self.kv_events is not None:
            self.kv_events.start()
        if self.prefixes is not None:
            self.prefixes.start(self.tasks)
        self.heartbeat.start()
        self.credentials.start(self.tasks)
        if self.tokens is not None:
            self.tasks.keep(self.tokens.canaries.run, "canaries")
        self.prober.start()
        self.stalls.start()
        self.exclusions.start()

    async def drain(self, requests: Collection[asyncio.Task[object]]) -> None:
        """Refuse new requests, and wait for those in flight and for the release of their KV. See `app.drain`."""
        deadline = self.settings.deadlines.drain
        await drain(requests, self.admission, self.custodian, deadline, self.observers, self.turns)

    async def stop(self) -> None:
        """End all background tasks, and drop all connections."""
        self.heartbeat.stop()
        await self.tasks.settle(0)
        self.notices.socket.close()
        if self.registrations is not None:
            self.registrations.socket.close()
        if self.kv_events is not None:
            self.kv_events.stop()
        if self.prefixes is not None:
            self.prefixes.of_requests.stop()
        if self.tokens is not None:
            self.tokens.stop()
        for engine in self.engines.known.values():
            engine.client.close()
        await self.bodies.workers.close()
        await self.admin.close()
        await self.legs.close()
