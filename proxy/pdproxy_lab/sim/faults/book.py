"""Armed faults: what a fault may contain, its text form, and which request it happens to. Pure.

The server asks the book at each moment of a request and carries out what it gets.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdproxy_lab.sim.faults.kind import Argument, FaultError, FaultKind, Occurrence
from pdproxy_lab.sim.faults.kinds import KINDS
from pdproxy_lab.sim.faults.moments import MESSAGES, MOMENTS, SPELLED, Moment


class Situation(msgspec.Struct, kw_only=True):
    """The state of a request when the book is asked."""

    path: str = ""
    body: bytes = b""
    generating: bool = False
    release: bool = False
    """It releases a handle: a generating request with `max_tokens: 0`."""
    stream: bool = False
    head_out: bool = False
    events: int = 0
    """Events with output that have been sent."""
    rank: int = 0
    """The worker whose notice is due, or the data-parallel rank whose KV events are."""


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: what, when, and to which requests."""

    kind: str
    at: Moment | None = None
    """None: the kind's default moment; never None once made."""
    next: int | None = None
    """It happens to the next `next` requests. Without this and without `rate`: to one."""
    rate: float | None = None
    """It happens to this share of all requests, above 0 up to 1."""
    seed: int | None = None
    """Of all draws; None: the book's."""
    path: str | None = None
    """Only requests of this path; None: the generating routes."""
    stream: bool | None = None
    """Only streamed (true) or whole (false) answers; None: both."""
    holds: str | None = None
    """Only requests whose body holds this text; None: all."""
    releases: bool = False
    """Also requests that only release a handle (`max_tokens: 0`)."""
    events: int = 2
    """When `mid_stream` is: after so many events with output."""
    args: dict[str, Argument] = {}
    """The kind's own arguments; complete once made."""

    def __post_init__(self) -> None:
        """Fill in what was left out.

        Raises:
            FaultError: the fields don't fit together.
        """
        if self.kind not in KINDS:
            raise FaultError(f"kind = {self.kind!r} is none of {', '.join(KINDS)}")
        kind = self.definition
        at = self.at or kind.moments[0]
        if at not in kind.moments:
            raise FaultError(
                f"at = {at!r} is no moment of {self.kind}: its moments are "
                f"{', '.join(kind.moments)}"
            )
        self._check_choice()
        args = _complete(kind, self.args)
        kind.check(at, args)
        if at in MESSAGES and (
            self.path is not None or self.stream is not None or self.holds is not None
        ):
            raise FaultError(
                f"{self.kind} takes no path, no stream and no holds: {SPELLED[at]} is no answer"
            )
        if kind.streams and self.stream is False:
            raise FaultError(f"{self.kind} can't happen to whole answers (stream = false)")
        msgspec.structs.force_setattr(self, "at", at)
        msgspec.structs.force_setattr(self, "args", args)
        if self.next is None and self.rate is None and not kind.closes_port:
            msgspec.structs.force_setattr(self, "next", 1)

    @property
    def definition(self) -> FaultKind:
        """Its kind."""
        return KINDS[self.kind]

    def _check_choice(self) -> None:
        if self.definition.closes_port:
            given = {
                "next": self.next,
                "rate": self.rate,
                "path": self.path,
                "stream": self.stream,
                "holds": self.holds,
            }
            if wrong := [name for name, value in given.items() if value is not None]:
                raise FaultError(
                    f"{self.kind} takes no {wrong[0]}: a closed port receives no requests"
                )
        if self.next is not None and self.rate is not None:
            raise FaultError("next and rate exclude each other")
        if self.next is not None and self.next < 1:
            raise FaultError(f"next must be at least 1, got {self.next}")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise FaultError(f"rate must be above 0 and at most 1, got {self.rate}")
        if self.events < 1:
            raise FaultError(f"events must be at least 1, got {self.events}")

    def fits(self, at: Moment, now: Situation) -> bool:
        """Return whether it can happen to a request at this moment."""
        if self.at != at or (at == "mid_stream" and now.events != self.events):
            return False
        if at == "accept":
            return True
        if at in MESSAGES:
            return self.args["rank"] in ("", str(now.rank))
        if now.path != self.path if self.path is not None else not now.generating:
            return False
        if (now.release and not self.releases) or self.stream not in (None, now.stream):
            return False
        if self.holds is not None and self.holds.encode() not in now.body:
            return False
        kind = self.definition
        return not (kind.streams and not now.stream) and not (kind.replaces and now.head_out)


def _complete(kind: FaultKind, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """Return a kind's arguments, with defaults filled in and with the types of the defaults."""
    found = dict(kind.args)
    for key, value in given.items():
        if key not in kind.args:
            known = ", ".join(
                [
                    *kind.args,
                    *(
                        name
                        for name in PlannedFault.__struct_fields__
                        if name not in ("kind", "at", "args")
                    ),
                ]
            )
            raise FaultError(f"{kind.name} takes no {key!r}: it takes {known}")
        wanted = type(kind.args[key])
        try:
            found[key] = msgspec.convert(value, wanted, strict=False)
        except msgspec.ValidationError:
            raise FaultError(f"{key} must be of type {wanted.__name__}, got {value!r}") from None
        if wanted in (int, float) and found[key] < 0:  # type: ignore[operator]
            raise FaultError(f"{key} must not be negative, got {value!r}")
    return found


def fault_of(values: Mapping[str, Any]) -> PlannedFault:
    """Make a fault of names and values. A kind's own arguments stand among them or in `args`; texts
    are converted.

    Raises:
        FaultError: a name or a value is wrong.
    """
    fields = {field.name for field in msgspec.structs.fields(PlannedFault)}
    own = {key: value for key, value in values.items() if key in fields}
    nested = values.get("args", {})
    if not isinstance(nested, Mapping):
        raise FaultError(f"args must be an object, got {nested!r}")
    own["args"] = {**nested, **{key: value for key, value in values.items() if key not in fields}}
    if "kind" not in own:
        raise FaultError("kind is missing")
    for field in msgspec.structs.fields(PlannedFault):
        if field.name not in own or field.name == "args":
            continue
        if field.name == "at" and own["at"] not in (None, *MOMENTS):
            raise FaultError(f"at = {own['at']!r} is none of {', '.join(MOMENTS)}")
        try:
            own[field.name] = msgspec.convert(own[field.name], field.type, strict=False)
        except msgspec.ValidationError:
            raise FaultError(f"{field.name} = {own[field.name]!r} has the wrong type") from None
    return PlannedFault(**own)


def parse(spec: str) -> PlannedFault:
    """Read a fault such as `reset@mid_stream:rate=0.1` or `status@queued:next=3,status=503`.

    Raises:
        FaultError: the text can't be read, or its values are wrong.
    """
    head, _, rest = spec.partition(":")
    kind, mark, at = head.partition("@")
    values: dict[str, Any] = {"kind": kind}
    if mark:
        values["at"] = at
    for pair in rest.split(",") if rest else ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise FaultError(f"{pair!r} is not KEY=VALUE")
        if key in values or key == "args":
            raise FaultError(f"{key!r} is given twice or not allowed in {rest!r}")
        values[key] = value
    return fault_of(values)


class Armed:
    """A fault in the book."""

    def __init__(self, number: int, fault: PlannedFault, seed: str) -> None:
        self.number = number
        self.fault = fault
        self.left = fault.next
        """The number of requests that it will still happen to; None: no limit."""
        self.fired = 0
        self.chance = random.Random(seed)


class FaultBook:
    """The faults that are armed, and how often each has happened."""

    def __init__(self, chance: int = 0) -> None:
        self._chance = chance
        self._count = 0
        self.armed: dict[int, Armed] = {}
        self.happened: Counter[str] = Counter()
        """By `kind@moment`."""

    def add(self, fault: PlannedFault | str) -> int:
        """Arm a fault, or its text form; return its number.

        Raises:
            FaultError: the text can't be used.
        """
        made = parse(fault) if isinstance(fault, str) else fault
        self._count += 1
        seed = f"{self._chance}/{self._count}" if made.seed is None else str(made.seed)
        self.armed[self._count] = Armed(self._count, made, seed)
        self.changed()
        return self._count

    def remove(self, number: int) -> bool:
        """Disarm a fault; return whether there was one with that number."""
        found = self.armed.pop(number, None)
        self.changed()
        return found is not None

    def clear(self) -> None:
        """Disarm all faults."""
        self.armed.clear()
        self.changed()

    def changed(self) -> None:
        """Called after each change. Subclasses override it."""

    def closing_port(self) -> list[Armed]:
        """Return the armed faults that close the port."""
        return [one for one in self.armed.values() if one.fault.definition.closes_port]

    def due(self, at: Moment, now: Situation) -> Iterator[Occurrence]:
        """Yield the faults that happen to a request at this moment, in the order of arming. Each
        one is counted.
        """
        for one in list(self.armed.values()):
            fault = one.fault
            if not fault.fits(at, now) or fault.definition.closes_port:
                continue
            if fault.rate is not None and one.chance.random() >= fault.rate:
                continue
            one.fired += 1
            self.happened[f"{fault.kind}@{at}"] += 1
            if one.left is not None:
                one.left -= 1
                if not one.left:
                    self.armed.pop(one.number, None)
            yield Occurrence(fault.definition, at, fault.args, one.chance)
