"""Connects the parts that serve clients for uvicorn: the data path's protocol class, and the answers of all other routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from pdproxy.app.shown import Shown
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.serving.access.tenants import Tenants
from pdproxy.serving.dispatch.decisions import Decisions
from pdproxy.serving.request.admission import Admission
from pdproxy.serving.request.hints import noted, session_of
from pdproxy.serving.request.passthrough import Passthrough
from pdproxy.serving.request.service import Service
from pdproxy.settings.schema import Settings
from pdproxy.web.app import Answers
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.client_identifier import ClientIdentifier
from pdproxy.web.connection_bounds import ConnectionBounds
from pdproxy.web.connections import Connections
from pdproxy.web.cors import CorsHeaders
from pdproxy.web.cycle import FORWARDED, DataPath
from pdproxy.web.passthrough_asgi import PassthroughAsgi
from pdproxy.web.protocol import DataPathProtocol, protocol_class
from pdproxy.web.refusals import report_refusal
from pdproxy.web.slow_readers import SlowReaderPolicy
from pdproxy.web.unread_answers import UnreadAnswers


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The parts that serve clients. `models` and `telemetry`: see `web.app.Answers`."""

    settings: Settings
    keys: Keys
    clients: Clients
    admission: Admission
    service: Service
    passthrough: Passthrough
    bodies: BodyBudget
    unread_answers: UnreadAnswers
    connections: Connections
    clock: Clock
    observers: Observers
    shown: Shown
    models: Callable[[bytes | None], Awaitable[bytes]]
    telemetry: Callable[[bytes], bool] | None
    decisions: Decisions

    def _identifier(self) -> ClientIdentifier:
        overload = self.settings.overload
        tenants = Tenants(self.clients, self.keys, overload.tenant_header, overload.weights)
        return ClientIdentifier(self.clients, self.keys, self.observers, tenants)

    def protocol(self) -> type[DataPathProtocol]:
        """Return the protocol class for uvicorn."""
        limits, deadlines = self.settings.limits, self.settings.deadlines
        slow_readers = SlowReaderPolicy(
            limits.min_read_rate,
            deadlines.client_write,
            self.clock,
            self.clients,
            self.observers,
            self.admission.over_share,
        )
        bounds = ConnectionBounds(
            deadlines.client_head,
            deadlines.client_body,
            limits.max_header_bytes,
            slow_readers,
            self.clients,
            self.connections,
            self.unread_answers,
        )
        path = DataPath(
            self.service.generate,
            self._identifier(),
            self.observers,
            bounds,
            CorsHeaders(self.settings.listen.cors),
            self.bodies,
            max_body=limits.max_body_bytes,
            hints=noted(self.service.session_header),
        )
        return protocol_class(path)

    def answers(self) -> Answers:
        """Return what the FastAPI routes answer with."""
        passthrough = PassthroughAsgi(
            self.passthrough.serve,
            self._identifier(),
            self.clients,
            self.bodies,
            FORWARDED,
            max_body=self.settings.limits.max_body_bytes,
            refused=partial(report_refusal, self.observers),
            session=partial(session_of, self.service.session_header),
        )
        return Answers(
            self.keys.check,
            self.shown.load,
            self.shown.readiness,
            self.models,
            self.shown.metrics,
            passthrough,
            self.settings.listen.cors,
            self.telemetry,
            decisions=self.decisions.page,
            refused=partial(report_refusal, self.observers),
        )
