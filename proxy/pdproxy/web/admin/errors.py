"""What the admin API refuses, and how its errors look: OpenAI's shape, with the owner of an engine
where that is the reason.
"""

from __future__ import annotations

import msgspec

from pdproxy.fleet.member import MembershipError, UnknownMemberError
from pdproxy.kit.errors import BadRequestError, Fault, PdproxyError
from pdproxy.settings.errors import SettingsError
from pdproxy.wire.errors import error_body

MAX_MISTAKES = 20
"""Mistakes of a body that are named."""


class NotThereError(BadRequestError):
    """There is no such engine."""

    status = 404
    type = "NotFoundError"


class ConflictError(BadRequestError):
    """It can't be done to this engine now. `owner`: the source that has added it, if that is
    why.
    """

    status = 409
    type = "ConflictError"

    def __init__(self, message: str, owner: str | None = None) -> None:
        super().__init__(message)
        self.owner = owner


class UnknownOutcomeError(PdproxyError):
    """It is not known whether a change lasts."""

    fault = Fault.CAPACITY
    status = 503
    type = "ServiceUnavailableError"


def refusal(error: MembershipError | SettingsError) -> PdproxyError:
    """Return what an operator is told of an engine that can't be changed so."""
    if isinstance(error, UnknownMemberError):
        return NotThereError(str(error))
    if isinstance(error, MembershipError):
        return ConflictError(str(error), error.owner)
    return BadRequestError("; ".join(error.mistakes[:MAX_MISTAKES]))


def body_of(error: PdproxyError) -> bytes:
    """Return the body of an error. Operators may read engines' addresses."""
    if error.fault is not Fault.CLIENT:
        return error_body(error)
    fields = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if isinstance(error, ConflictError) and error.owner is not None:
        fields["owner"] = error.owner
    return msgspec.json.encode({"error": fields})
