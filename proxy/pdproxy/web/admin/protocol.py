"""The connections of the admin API: uvicorn's protocol, with the bounds of clients' connections,
without the data path.
"""

from __future__ import annotations

from pdproxy.observe.events import Observers
from pdproxy.web.admin.gate import Gate
from pdproxy.web.connection_bounds import ConnectionBounds
from pdproxy.web.guard import GuardedProtocol


class AdminProtocol(GuardedProtocol):
    """A connection of an operator. `admin_protocol` makes a subclass with bounds."""

    gate: Gate
    __slots__ = ()

    def takes_body(self) -> bool:
        return self.gate.takes_body(self.scope)  # type: ignore[arg-type]


def admin_protocol(
    bounds: ConnectionBounds, observers: Observers, gate: Gate
) -> type[AdminProtocol]:
    """Return a protocol class for uvicorn's `http` setting. `gate`: who may use the admin API, and
    send it a body.
    """
    return type(
        "BoundAdminProtocol",
        (AdminProtocol,),
        {"bounds": bounds, "observers": observers, "gate": gate},
    )
