"""The generating routes. Each has a module in `wire.routes`, and a line here."""

from __future__ import annotations

from enum import Enum
from typing import Self

from pdproxy.wire.route_form import RouteForm
from pdproxy.wire.routes import (
    batch,
    chat,
    cohere,
    completions,
    generate,
    invocations,
    messages,
    responses,
)


class Route(Enum):
    """A generating route; its value is its path. Legs use all but two: what batches and invocations
    are for engines is in `wire.client_routes`.
    """

    form: RouteForm
    path: str

    COMPLETIONS = completions.FORM
    CHAT = chat.FORM
    BATCH = batch.FORM
    INVOCATIONS = invocations.FORM
    RESPONSES = responses.FORM
    MESSAGES = messages.FORM
    GENERATE = generate.FORM
    COHERE = cohere.FORM

    __hash__ = object.__hash__  # an enum's own hash is slow code: sets of routes are asked often

    def __new__(cls, form: RouteForm | str) -> Self:
        """Make a route of its form. Later, `Route(path)` finds one."""
        assert isinstance(form, RouteForm)
        route = object.__new__(cls)
        route._value_ = form.path
        route.form, route.path = form, form.path
        return route
