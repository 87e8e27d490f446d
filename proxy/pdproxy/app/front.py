"""Connects the parts that serve clients for uvicorn: the data path's protocol class, and the
answers of all other routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdproxy.app.readiness import ReadinessCheck
from pdproxy.app.shown import Shown
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.scheduling.admission import Admission
from pdproxy.serving.access.cache_salts import CacheSalts
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.access.keys import Keys, ValidKey
from pdproxy.serving.access.tenants import Tenants
from pdproxy.serving.request.hints import noted, session_of
from pdproxy.serving.request.passthrough import Passthrough
from pdproxy.serving.request.realtime import serve_websocket
from pdproxy.serving.request.service import Service
from pdproxy.serving.request.traced import TracedRequests
from pdproxy.settings.schema import Settings
from pdproxy.web.app import AnswerMakers
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.client_identifier import ClientIdentifier
from pdproxy.web.connection_bounds import ConnectionBounds
from pdproxy.web.connections import Connections
from pdproxy.web.cors import CorsHeaders
from pdproxy.web.cycle import FORWARDED, DataPath, Generate
from pdproxy.web.operation import Operation
from pdproxy.web.operators import Operators
from pdproxy.web.passthrough_asgi import PassthroughAsgi, ServePassed
from pdproxy.web.protocol import DataPathProtocol, protocol_class
from pdproxy.web.refusals import report_refusal
from pdproxy.web.slow_readers import SlowReaderPolicy
from pdproxy.web.unread_answers import UnreadAnswers
from pdproxy.web.websocket import Serve, WebSockets
from pdproxy.web.wrong_keys import WrongKeys


@dataclass(slots=True, kw_only=True)
class Front:
    """The parts that serve clients. `models`: see `web.app.AnswerMakers`.

    `service` and `passthrough` get all requests. `session_headers` returns the headers that name a
    conversation.
    """

    settings: Settings
    keys: Keys
    admin_keys: Keys
    clients: Clients
    cache_salts: CacheSalts
    admission: Admission
    service: Service
    passthrough: Passthrough
    session_headers: Callable[[], Sequence[str | None]]
    bodies: BodyBudget
    unread_answers: UnreadAnswers
    connections: Connections
    clock: Clock
    observers: Observers
    shown: Shown
    readiness: ReadinessCheck
    models: Callable[[bytes | None, ValidKey | None], Awaitable[bytes]]
    wrong_keys: WrongKeys
    traced: TracedRequests | None = None
    """Begins requests' traces, None where none are exported."""
    tenants: Tenants = field(init=False)
    bounds: ConnectionBounds = field(init=False)
    path: DataPath = field(init=False)
    asgi: PassthroughAsgi = field(init=False)

    def __post_init__(self) -> None:
        """Make what serves requests."""
        limits, deadlines, overload = (
            self.settings.limits,
            self.settings.deadlines,
            self.settings.overload,
        )
        self.tenants = Tenants(
            self.clients, self.keys, overload.tenant_header, overload.weights, self.cache_salts
        )
        identify = ClientIdentifier(
            self.clients, self.keys, self.observers, self.tenants, self.wrong_keys
        )
        slow_readers = SlowReaderPolicy(
            limits.min_read_rate,
            deadlines.client_write,
            self.clock,
            self.clients,
            self.observers,
            self.admission.over_share,
        )
        self.bounds = ConnectionBounds(
            deadlines.client_head,
            deadlines.client_body,
            limits.max_header_bytes,
            slow_readers,
            self.clients,
            self.connections,
            self.unread_answers,
            limits.min_send_rate,
            deadlines.total,
        )
        traced = self.traced
        generate: Generate = self.service.generate
        passed: ServePassed = self.passthrough.serve
        if traced is not None:
            generate = traced.generating(self.service.generate)
            passed = traced.passed(self.passthrough.serve)
        self.path = DataPath(
            generate,
            identify,
            self.observers,
            self.bounds,
            CorsHeaders(self.settings.listen.cors),
            self.bodies,
            max_body=limits.max_body_bytes,
            hints=noted(*self.session_headers()),
        )
        self.asgi = PassthroughAsgi(
            passed,
            identify,
            self.clients,
            self.bodies,
            FORWARDED,
            max_body=limits.max_body_bytes,
            refused=partial(report_refusal, self.observers),
            session=self._session,
        )

    def configure(self) -> None:
        """Use the settings as they are now. Connections that are open follow them at their next
        request.
        """
        limits, deadlines, overload = (
            self.settings.limits,
            self.settings.deadlines,
            self.settings.overload,
        )
        self.tenants.configure(overload.tenant_header, overload.weights)
        bounds = self.bounds
        bounds.head_timeout, bounds.body_timeout = deadlines.client_head, deadlines.client_body
        bounds.min_send_rate, bounds.longest_body = limits.min_send_rate, deadlines.total
        bounds.max_header_bytes = limits.max_header_bytes
        bounds.slow_readers.min_rate, bounds.slow_readers.seconds = (
            limits.min_read_rate,
            deadlines.client_write,
        )
        self.path.max_body = self.asgi.max_body = limits.max_body_bytes
        self.path.note(noted(*self.session_headers()))

    def _session(self, headers: Mapping[bytes, bytes]) -> str | None:
        return next(
            filter(None, (session_of(name, headers) for name in self.session_headers())), None
        )

    def protocol(self) -> type[DataPathProtocol]:
        """Return the protocol class for uvicorn."""
        serve: Serve = partial(serve_websocket, self.passthrough)
        if self.traced is not None:
            serve = self.traced.passed(serve)
        websockets = WebSockets(serve, self.observers, self._session)
        return protocol_class(self.path, self.settings.listen.root_path, websockets)

    @property
    def operation(self) -> Operation:
        """What operators and health checks are answered."""
        shown, readiness = self.shown, self.readiness
        return Operation(
            shown.load,
            shown.readiness,
            shown.metrics,
            readiness.not_taking,
            readiness.engines,
            shown.work_at,
        )

    def answers(self) -> AnswerMakers:
        """Return what the FastAPI routes answer with."""
        return AnswerMakers(
            self.operation,
            self.models,
            self.asgi,
            self.settings.listen.cors,
            self.settings.listen.root_path,
            operators=Operators(
                self.admin_keys,
                lambda: self.settings.hides_operator_routes,
                lambda: self.settings.auth.reader_key_digests,
            ),
        )

    def warnings(self) -> list[str]:
        """Return what an operator should know at the start."""
        settings = self.settings
        if (
            not settings.hides_operator_routes
            or self.admin_keys.wanted
            or settings.auth.reader_key_digests
            or settings.listen.admin is not None
        ):
            return []
        what = "nobody can see /metrics, /docs, /load, /version and the details of /ready"
        return [
            (
                f"{what}: they are for operators (listen.operator_routes), but auth.admin_keys and "
                f"listen.admin are not set"
            )
        ]
