"""What a worker and the scheduler process send each other about engines that disappear under
requests, and about requests that are tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pdproxy.kit.errors import EnginesLostError
from pdproxy.scheduling.losses import Fingerprint

if TYPE_CHECKING:
    Client = bytes | str
else:
    Client = Any  # both are strings to msgspec, which can't tell them apart before it decodes


def topic(pool: int) -> str:
    """Return the topic of the messages of a pool."""
    return f"losses {pool}"


class Sender(msgspec.Struct, array_like=True):
    """A request under which engines may be lost. `number`: the worker's; `lost`: how many engines
    were lost under it before.
    """

    number: int
    request_id: str
    client: Client
    lost: int


# -- what a worker tells


class Broke(msgspec.Struct, array_like=True, tag=0):
    """`Losses.broke`. `at`: when it has broken."""

    sender: Sender
    url: str
    since: float
    at: float
    streamed: bool


class Left(msgspec.Struct, array_like=True, tag=1):
    """`Losses.left`. `legs`: to which engines, and since when."""

    sender: Sender
    legs: Sequence[tuple[str, float]]
    fingerprint: Fingerprint


class Answered(msgspec.Struct, array_like=True, tag=2):
    """`Losses.answered`."""

    client: Client
    fingerprint: Fingerprint | None
    whole: bool


class Over(msgspec.Struct, array_like=True, tag=3):
    """A request is over."""

    number: int


class SlotOver(msgspec.Struct, array_like=True, tag=4):
    """`Slot.leave`. `number`: of the question for it; `lost`: whether `Slot.lost` was called."""

    number: int
    lost: bool


class TurnOver(msgspec.Struct, array_like=True, tag=5):
    """`Turn.leave`, or `Turn.leave_in` so many seconds. `number`: of the question for it."""

    number: int
    harmless: bool
    seconds: float | None = None


class HeldSlots(msgspec.Struct, array_like=True, tag=6):
    """The slots that the worker has of a scheduler process that was before."""

    numbers: Sequence[int]


Told = Broke | Left | Answered | Over | SlotOver | TurnOver | HeldSlots


# -- what a worker asks


class AskSlot(msgspec.Struct, array_like=True, tag=0):
    """For a place for one more attempt. `sender`: None if no engine was lost under the request. The
    answer: whether there is one.
    """

    sender: Sender | None


class AskChange(msgspec.Struct, array_like=True, tag=1):
    """For a change of engines that stand still. The answer: as of `Comebacks.wait`."""

    model: str | None
    until: float


class AskTurn(msgspec.Struct, array_like=True, tag=2):
    """`Losses.turn`. The answer: a `TurnAnswer`."""

    sender: Sender
    fingerprint: Fingerprint
    seconds: float


class AskJudge(msgspec.Struct, array_like=True, tag=3):
    """`Losses.judge`. The answer: a `Judgement`."""

    sender: Sender
    fingerprint: Fingerprint | None
    looks_back: bool


class AskForbidden(msgspec.Struct, array_like=True, tag=4):
    """`Losses.forbidden`. The answer: URLs."""

    sender: Sender


Question = AskSlot | AskChange | AskTurn | AskJudge | AskForbidden


# -- what the scheduler process answers, and tells


class Refusal(msgspec.Struct, array_like=True):
    """An EnginesLostError."""

    text: str
    retry_after: float | None

    @classmethod
    def of(cls, error: EnginesLostError) -> Refusal:
        """Return what a worker is sent for an error."""
        return cls(error.message, error.retry_after)

    @property
    def error(self) -> EnginesLostError:
        """The error."""
        return EnginesLostError(self.text, retry_after=self.retry_after)


class TurnAnswer(msgspec.Struct, array_like=True):
    """Whether there is a turn, or why the request is refused."""

    is_given: bool
    refusal: Refusal | None = None


class Judgement(msgspec.Struct, array_like=True):
    """How many engines were lost under a request, and why no other one is tried."""

    lost: int
    refusal: Refusal | None


class Known(msgspec.Struct, array_like=True):
    """All suspects."""

    fingerprints: Sequence[Fingerprint]
    clients: Sequence[Client]


# -- as bytes

T = TypeVar("T")
encode = msgspec.msgpack.Encoder().encode
decode_told = msgspec.msgpack.Decoder(Told).decode
decode_asked = msgspec.msgpack.Decoder(Question).decode


def decoded(body: bytes, wanted: type[T]) -> T:
    """Return an answer, or the like. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(body, type=wanted)
