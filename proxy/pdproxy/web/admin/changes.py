"""A change that an operator asks for, and what came of it, in a form that can be sent to other
processes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal, Self

import msgspec

from pdproxy.kit.errors import PdproxyError
from pdproxy.web.admin.errors import ConflictError, error_of
from pdproxy.web.admin.shapes import EngineChanged, LevelShown

Kind = Literal["add", "drain", "undrain", "remove", "log_level"]


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A change. `engine`: the URL or id of the engine that it is about; `body`: the request's,
    JSON.

    `at_once`, `seconds`: see `AdminService.remove`. `instead_of`: the level of the settings that a
    log level takes the place of.
    """

    kind: Kind
    engine: str = ""
    body: str = "{}"
    at_once: bool = False
    seconds: float | None = None
    instead_of: str = ""

    @classmethod
    def of(cls, kind: Kind, engine: str, fields: Mapping[str, Any]) -> Self:
        """Return a change with the body of a request, which may have numbers of any size: JSON
        alone takes them all.
        """
        return cls(kind, engine, json.dumps(fields))

    @property
    def fields(self) -> dict[str, Any]:
        """The body of the request."""
        found: dict[str, Any] = json.loads(self.body)
        return found


class ChangeOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What came of a change in one process: what was done, or the status, message and owner of a
    refusal.

    `url`: of the engine, as far as it is known.
    """

    status: int
    url: str = ""
    changed: EngineChanged | None = None
    level: LevelShown | None = None
    message: str = ""
    owner: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether it was done."""
        return self.status < 400

    @property
    def result(self) -> str:
        """What was done with the engine, empty if nothing."""
        return "" if self.changed is None else self.changed.result

    def answer(self) -> tuple[int, EngineChanged | LevelShown]:
        """Return the status and the answer of what was done.

        Raises:
            PdproxyError: it was refused.
        """
        if (found := self.changed or self.level) is None:
            raise error_of(self.status, self.message, self.owner)
        return self.status, found


def is_accepted(kind: Kind, outcomes: Collection[ChangeOutcome]) -> bool:
    """Return whether a change is in force, by what came of it in all processes that have answered.

    An engine must be added by all of them. A change of one that some do not have any more is made
    by the others.
    """
    if kind in ("add", "log_level"):
        return all(one.accepted for one in outcomes)
    return not outcomes or any(one.accepted for one in outcomes)


def refused(error: PdproxyError, url: str) -> ChangeOutcome:
    """Return the outcome of a change that was refused."""
    owner = error.owner if isinstance(error, ConflictError) else None
    return ChangeOutcome(error.status, url, message=error.message, owner=owner)


encode_change = msgspec.msgpack.Encoder().encode
decode_change = msgspec.msgpack.Decoder(Change).decode
encode_outcome = msgspec.msgpack.Encoder().encode
decode_outcome = msgspec.msgpack.Decoder(ChangeOutcome).decode
