"""What a worker and the scheduler process send each other about engines for requests.

Each side sends lists of items, one list per turn of its event loop, in order. A choice has a
number, which the worker never uses twice; the leases that it gets have that number and the ones
behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pdproxy.deciding.kept_turns import Reuse
from pdproxy.kit.errors import LimitError, OverloadedError, RefusalReason, TooLateError
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.prefix.keys import PromptKeys
from pdproxy.scheduling.prefix.prompts import PromptBeginning
from pdproxy.scheduling.scheduler import Constraints
from pdproxy.scheduling.transfer_faults import KnownTransfers
from pdproxy.workers.admission_messages import ForAdmission, HeldPlace, HeldUse, OfAdmission
from pdproxy.workers.turn_messages import Dropped, Ended, Freed, Kept, Open

# -- from a worker


class Choose(msgspec.Struct, array_like=True, tag=0):
    """`Scheduler.choose`. `pool`: the number of the pool."""

    number: int
    pool: int
    request_id: str
    ask: Ask
    constraints: Constraints


class ChooseTurn(Choose, array_like=True, tag=40):
    """`Scheduler.choose` where turns are kept. `turn`: what the turn before is found by."""

    turn: bytes


class ChooseOne(msgspec.Struct, array_like=True, tag=1):
    """`Scheduler.choose_one`."""

    number: int
    pool: int
    ask: Ask
    without: Sequence[str]
    avoid: Sequence[str]


class ChooseEncoders(msgspec.Struct, array_like=True, tag=2):
    """`Scheduler.choose_encoders`."""

    number: int
    pool: int
    asks: Sequence[Ask]
    without: Sequence[str]
    proven: bool


Choice = Choose | ChooseTurn | ChooseOne | ChooseEncoders


class Unwanted(msgspec.Struct, array_like=True, tag=3):
    """Nobody waits for a choice any more. Its leases, `most` at most, are to be ended."""

    number: int
    most: int


class Began(msgspec.Struct, array_like=True, tag=4):
    """`Scheduler.began`."""

    lease: int
    at: float


class Closed(msgspec.Struct, array_like=True, tag=5):
    """`Scheduler.close`, with what `Scheduler.cached` was told before."""

    lease: int
    verdict: Verdict
    at: float
    pace: float | None
    tokens: int | None
    beside: int
    reported: int | None
    prompt: int


class Failed(msgspec.Struct, array_like=True, tag=6):
    """`Scheduler.failed`. The rest: of the lease, which is closed."""

    pool: int
    url: str
    role: Role
    trial: int
    at: float


class KvTook(msgspec.Struct, array_like=True, tag=7):
    """`Scheduler.kv_took`."""

    pool: int
    prefill: str
    decode: str
    at: float
    seconds: float


class KvFailed(msgspec.Struct, array_like=True, tag=14):
    """`Scheduler.kv_failed`."""

    pool: int
    prefill: str
    decode: str
    at: float
    first: bool


class KvNotMade(msgspec.Struct, array_like=True, tag=15):
    """`Scheduler.kv_not_made`."""

    pool: int
    prefill: str
    at: float


class KvLoaded(msgspec.Struct, array_like=True, tag=16):
    """`Scheduler.kv_loaded`."""

    pool: int
    prefill: str
    decode: str
    since: float


class Prefilled(msgspec.Struct, array_like=True, tag=41):
    """`Scheduler.prefilled`."""

    lease: int
    tokens: int
    seconds: float


class OfTurn(msgspec.Struct, array_like=True, tag=42):
    """Something about kept turns. `number`: the worker's own, never used twice."""

    pool: int
    worker: int
    number: int
    news: Kept | Dropped | Ended | Freed | Open


class RefusesReports(msgspec.Struct, array_like=True, tag=8):
    """`Scheduler.refuses_reports`."""

    pool: int
    url: str


class LostModel(msgspec.Struct, array_like=True, tag=9):
    """`Scheduler.lost_model`."""

    pool: int
    url: str
    model: str


class FoundGone(msgspec.Struct, array_like=True, tag=10):
    """`Scheduler.found_gone`."""

    pool: int
    url: str
    why: str
    at: float


class RefusesMore(msgspec.Struct, array_like=True, tag=13):
    """An engine has refused a request since it has too many."""

    pool: int
    url: str


class SpaceFree(msgspec.Struct, array_like=True, tag=11):
    """The space that was taken with a lease is free."""

    lease: int


class Held(msgspec.Struct, array_like=True):
    """A lease that a worker has. `number`: its own; `space`: the tokens whose KV has space, 0 where
    none was taken.
    """

    number: int
    pool: int
    url: str
    role: Role
    prompt_bytes: int
    since: float
    space: int


class Holds(msgspec.Struct, array_like=True, tag=12):
    """What the worker has of a scheduler process that was before. Behind it, the worker asks."""

    leases: Sequence[Held]
    places: Sequence[HeldPlace] = ()
    uses: Sequence[HeldUse] = ()


class Said(msgspec.Struct, array_like=True, tag=17):
    """Something rare, either way: `topic` says what it is about, and so how `body` is read."""

    topic: str
    body: bytes


class Asked(msgspec.Struct, array_like=True, tag=30):
    """Something rare that is asked: `topic` says what it is about, and so how `body` is read. The
    number is one of those of choices.
    """

    number: int
    topic: str
    body: bytes


FromWorker = (
    Choose
    | ChooseTurn
    | ChooseOne
    | ChooseEncoders
    | Unwanted
    | Began
    | Closed
    | Failed
    | KvTook
    | KvFailed
    | KvNotMade
    | KvLoaded
    | Prefilled
    | OfTurn
    | RefusesReports
    | LostModel
    | FoundGone
    | RefusesMore
    | SpaceFree
    | OfAdmission
    | Said
    | Asked
    | Holds
)


# -- from the scheduler process


class Leased(msgspec.Struct, array_like=True):
    """A lease. `expected`: whether anything is known of its engine's cache; `reports`: whether the
    engine is asked to report what it finds there. `beside_idle`: see `scheduling.leases.Lease`.
    """

    url: str
    role: Role
    prompt_bytes: int
    since: float
    trial: int
    expected: bool
    reports: bool
    beside_idle: bool


class Chosen(msgspec.Struct, array_like=True, tag=0):
    """The leases of a choice, none where there are no engines. `space`: whether space for KV was
    taken with them.
    """

    number: int
    leases: Sequence[Leased]
    reason: str = ""
    values: Mapping[str, float] | None = None
    space: bool = False


class ChosenTurn(Chosen, array_like=True, kw_only=True, tag=40):
    """Such leases, with the turn before the prompt. `pool`: the number of the pool."""

    pool: int
    turn: Reuse


class Refused(msgspec.Struct, array_like=True, tag=1):
    """A choice that has ended in an error. `kind`: see `_KINDS`."""

    number: int
    kind: int
    text: str
    reason: str
    retry_after: float | None


class Welcome(msgspec.Struct, array_like=True, tag=2):
    """The scheduler process knows the engines, and what workers have: from now on it chooses."""


class TransfersKnown(msgspec.Struct, array_like=True, tag=3):
    """What is known of KV that does not move: all of it."""

    pool: int
    known: KnownTransfers


class Replied(msgspec.Struct, array_like=True, tag=30):
    """The answer to what was asked."""

    number: int
    body: bytes


FromScheduler = (
    Chosen | ChosenTurn | Refused | Welcome | TransfersKnown | Said | Replied | ForAdmission
)

_KINDS: tuple[type[OverloadedError], ...] = (OverloadedError, TooLateError, LimitError)


def refused(number: int, error: OverloadedError) -> Refused:
    """Return what a worker is sent for an error."""
    kind = _KINDS.index(type(error)) if type(error) in _KINDS else 0
    reason = error.reason or RefusalReason.NO_ENGINE
    return Refused(number, kind, error.message, reason.value, error.retry_after)


def error_of(told: Refused) -> OverloadedError:
    """Return the error that a worker was sent."""
    kind = _KINDS[told.kind]
    if kind is TooLateError:
        return TooLateError(told.text)
    return kind(told.text, RefusalReason(told.reason), retry_after=told.retry_after)


# -- as bytes


def _to_plain(value: object) -> object:
    if isinstance(value, PromptBeginning):
        return value.tokens, value.unit, value.of_text, value.keys.unit, value.keys.all()
    raise TypeError(type(value).__name__)


_beginning = tuple[int, int, bool, int, list[int]]


def _from_plain(wanted: type, value: object) -> object:
    if wanted is PromptBeginning:
        tokens, unit, of_text, size, keys = msgspec.convert(value, _beginning)
        return PromptBeginning(PromptKeys(size, iter([keys])), tokens, unit, of_text=of_text)
    raise TypeError(wanted.__name__)


encode_item = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
"""Returns an item as bytes."""
decode_of_worker = msgspec.msgpack.Decoder(list[FromWorker], dec_hook=_from_plain).decode
"""Returns what a worker has sent. Raises msgspec.MsgspecError."""
decode_of_scheduler = msgspec.msgpack.Decoder(list[FromScheduler]).decode
"""Returns what the scheduler process has sent. Raises msgspec.MsgspecError."""
