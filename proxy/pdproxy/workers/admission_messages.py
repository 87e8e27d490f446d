"""What a worker and the scheduler process send each other about places of requests, and about the
limits of keys. Items of `scheduler_messages`: a place and a use of a key have numbers as a choice
has.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy.scheduling.admission import RequestDemand

ClientName = Any
"""`AdmittedClient.name`: bytes or a text. A field of msgspec can't have both types."""

# -- from a worker


class Enter(msgspec.Struct, array_like=True, tag=20):
    """`Admission.enter`. `number`: of the place; `client`, `weight`: see `AdmittedClient`."""

    number: int
    client: ClientName
    weight: float
    demand: RequestDemand
    deadline: float | None


class Left(msgspec.Struct, array_like=True, tag=21):
    """`Place.leave`."""

    place: int
    seconds: float
    prompt: int | None
    completion: int | None
    late: bool
    answered: bool


class UseKey(msgspec.Struct, array_like=True, tag=22):
    """`Quotas.enter`. `number`: of the use."""

    number: int
    key: str


class Reserve(msgspec.Struct, array_like=True, tag=23):
    """`Use.reserve`."""

    number: int
    use: int
    prompt: int
    most: int | None
    answers: int


class Spent(msgspec.Struct, array_like=True, tag=24):
    """`Use.spend`."""

    use: int
    tokens: int


class UseEnded(msgspec.Struct, array_like=True, tag=25):
    """`Use.end`."""

    use: int
    tokens: int
    unseen: float
    seen: int


class Charged(msgspec.Struct, array_like=True, tag=26):
    """`Use.add`. `own`: the most tokens of the request by its own size and limit."""

    key: str
    tokens: int
    own: int


class ReadsSlowly(msgspec.Struct, array_like=True, tag=27):
    """A client reads an answer too slowly, still."""

    client: ClientName


class CaughtUp(msgspec.Struct, array_like=True, tag=28):
    """A client reads no answer too slowly any more."""

    client: ClientName


class HeldPlace(msgspec.Struct, array_like=True):
    """A place that a request of a worker has. See `Enter`."""

    number: int
    client: ClientName
    weight: float
    demand: RequestDemand


class HeldUse(msgspec.Struct, array_like=True):
    """A use of a key. `reserved`: the arguments of `Use.reserve`, None before; `spent`: tokens."""

    number: int
    key: str
    reserved: tuple[int, int | None, int] | None
    spent: int


OfAdmission = Enter | Left | UseKey | Reserve | Spent | UseEnded | Charged | ReadsSlowly | CaughtUp

# -- from the scheduler process


class Granted(msgspec.Struct, array_like=True, tag=20):
    """What was asked for with this number is granted."""

    number: int


class Overdrawn(msgspec.Struct, array_like=True, tag=21):
    """The minute of a use's key has no tokens left."""

    use: int
    text: str
    retry_after: float | None


class Evict(msgspec.Struct, array_like=True, tag=22):
    """A client that reads too slowly is to lose an answer: others wait."""

    client: ClientName


ForAdmission = Granted | Overdrawn | Evict
