"""A change that an operator asks for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

Kind = Literal["add", "drain", "undrain", "remove", "log_level"]


class Change(msgspec.Struct, frozen=True):
    """A change. `engine`: the URL or id of the engine that it is about; `fields`: the request's
    body.

    `at_once`, `seconds`: see `AdminService.remove`.
    """

    kind: Kind
    engine: str = ""
    fields: Mapping[str, Any] = MappingProxyType({})
    at_once: bool = False
    seconds: float | None = None
