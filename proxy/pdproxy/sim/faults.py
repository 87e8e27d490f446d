"""Faults: what can go wrong with a simulated engine's answer, at which moment, for which requests. Pure.

Owns what a fault says, its text form, and the book of the faults that are armed. Nothing here acts: `sim.exchange` asks
the book at each moment of a request and has `sim.fault_actions` carry out what it gets. A fault whose moment does not come for a
request does not happen to it, and stays armed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdproxy.sim.fault_kinds import KINDS, MOMENTS, Argument, Moment


class FaultError(ValueError):
    """A fault that makes no sense. `str()` says what is wrong, in one line."""


class Situation(msgspec.Struct, kw_only=True):
    """Where a request stands when the book is asked."""

    path: str = ""
    generating: bool = False
    release: bool = False
    """A handle is given back: a generating request with `max_tokens: 0`."""
    stream: bool = False
    head_out: bool = False
    events: int = 0
    """Events with output that are out."""
    rank: int = 0
    """Whose notice is due."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: what, when, and to which requests."""

    kind: str
    at: Moment | None = None
    """None: the kind's default moment; never None once made."""
    next: int | None = None
    """It befalls the next so many requests. Neither this nor `rate`: the next one."""
    rate: float | None = None
    """It befalls this share of requests, above 0 up to 1, for ever."""
    seed: int | None = None
    """Of all draws; None: the book's."""
    path: str | None = None
    """Only requests of this path; None: the generating routes."""
    stream: bool | None = None
    """Only streamed (true) or whole (false) answers; None: both."""
    releases: bool = False
    """Also requests that only give a handle back (`max_tokens: 0`)."""
    events: int = 2
    """When `mid_stream` is."""
    args: dict[str, Argument] = {}
    """The kind's own; complete once made."""

    def __post_init__(self) -> None:
        """Fill in what was left out.

        Raises:
            FaultError: it makes no sense.
        """
        kind = KINDS.get(self.kind)
        if kind is None:
            raise FaultError(f"kind = {self.kind!r} is none of {', '.join(KINDS)}")
        at = self.at or kind.moments[0]
        if at not in kind.moments:
            raise FaultError(f"at = {at!r} is no moment of {self.kind}: it has {', '.join(kind.moments)}")
        self._check_choice()
        args = _complete(self.kind, kind.args, self.args)
        if args.get("what") == "json" and at in ("accept", "after"):
            raise FaultError(f"what = 'json' needs an answer: at = {at!r} has none")
        if at == "notice" and (self.path is not None or self.stream is not None):
            raise FaultError(f"{self.kind} takes no path and no stream: a notice is no answer")
        if kind.streams and self.stream is False:
            raise FaultError(f"{self.kind} can't happen to whole answers (stream = false)")
        msgspec.structs.force_setattr(self, "at", at)
        msgspec.structs.force_setattr(self, "args", args)
        if self.next is None and self.rate is None and self.kind != "refuse":
            msgspec.structs.force_setattr(self, "next", 1)

    def _check_choice(self) -> None:
        if self.kind == "refuse":
            given = {"next": self.next, "rate": self.rate, "path": self.path, "stream": self.stream}
            if wrong := [name for name, value in given.items() if value is not None]:
                raise FaultError(f"refuse takes no {wrong[0]}: a closed listener sees no requests")
        if self.next is not None and self.rate is not None:
            raise FaultError("next and rate exclude each other")
        if self.next is not None and self.next < 1:
            raise FaultError(f"next must be at least 1, got {self.next}")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise FaultError(f"rate must be above 0 and at most 1, got {self.rate}")
        if self.events < 1:
            raise FaultError(f"events must be at least 1, got {self.events}")

    def befalls(self, at: Moment, now: Situation) -> bool:
        """Tell whether it could happen to a request at this moment, were it its turn."""
        if self.at != at or (at == "mid_stream" and now.events != self.events):
            return False
        if at == "accept":
            return True
        if at == "notice":
            return self.args["rank"] in ("", str(now.rank))
        if now.path != self.path if self.path is not None else not now.generating:
            return False
        if (now.release and not self.releases) or self.stream not in (None, now.stream):
            return False
        kind = KINDS[self.kind]
        return not (kind.streams and not now.stream) and not (kind.replaces and now.head_out)


def _complete(name: str, known: Mapping[str, Argument], given: Mapping[str, Argument]) -> dict[str, Argument]:
    """Return a kind's arguments, defaults filled in and types as the defaults have them."""
    found = dict(known)
    for key, value in given.items():
        if key not in known:
            raise FaultError(f"{name} takes no {key!r}" + (f": it takes {', '.join(known)}" if known else ""))
        wanted = type(known[key])
        try:
            found[key] = msgspec.convert(value, wanted, strict=False)
        except msgspec.ValidationError:
            raise FaultError(f"{key} must be of type {wanted.__name__}, got {value!r}") from None
        if wanted in (int, float) and found[key] < 0:  # type: ignore[operator]
            raise FaultError(f"{key} must not be negative, got {value!r}")
    if (what := found.get("what", "http")) not in ("http", "json"):
        raise FaultError(f"what must be http or json, got {what!r}")
    if not 200 <= (status := int(found.get("status", 200))) <= 599:
        raise FaultError(f"status must be 200 to 599, got {status}")
    return found


def fault_of(values: Mapping[str, Any]) -> Fault:
    """Make a fault of names and values, a kind's own arguments among them or in `args`; texts are converted.

    Raises:
        FaultError: it makes no sense.
    """
    fields = {field.name for field in msgspec.structs.fields(Fault)}
    own = {key: value for key, value in values.items() if key in fields}
    nested = values.get("args", {})
    if not isinstance(nested, Mapping):
        raise FaultError(f"args must be an object, got {nested!r}")
    own["args"] = {**nested, **{key: value for key, value in values.items() if key not in fields}}
    if "kind" not in own:
        raise FaultError("kind is missing")
    for field in msgspec.structs.fields(Fault):
        if field.name not in own or field.name == "args":
            continue
        if field.name == "at" and own["at"] not in (None, *MOMENTS):
            raise FaultError(f"at = {own['at']!r} is none of {', '.join(MOMENTS)}")
        try:
            own[field.name] = msgspec.convert(own[field.name], field.type, strict=False)
        except msgspec.ValidationError:
            raise FaultError(f"{field.name} = {own[field.name]!r} is no value for it") from None
    return Fault(**own)


def parse(spec: str) -> Fault:
    """Read a fault such as `reset@mid_stream:rate=0.1` or `status@queued:next=3,status=503`.

    Raises:
        FaultError: it makes no sense.
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
            raise FaultError(f"{key!r} has no place in {rest!r}")
        values[key] = value
    return fault_of(values)


class Armed:
    """A fault in the book."""

    def __init__(self, number: int, fault: Fault, seed: str) -> None:
        self.number = number
        self.fault = fault
        self.left = fault.next
        """How many requests it will still befall; None: no end."""
        self.fired = 0
        self.chance = random.Random(seed)


class FaultBook:
    """The faults that are armed, and how often which has happened."""

    def __init__(self, chance: int = 0) -> None:
        self._chance = chance
        self._count = 0
        self.armed: dict[int, Armed] = {}
        self.happened: Counter[str] = Counter()
        """By `kind@moment`."""

    def add(self, fault: Fault | str) -> int:
        """Arm a fault, or its text form; return its number.

        Raises:
            FaultError: the text makes no sense.
        """
        made = parse(fault) if isinstance(fault, str) else fault
        self._count += 1
        seed = f"{self._chance}/{self._count}" if made.seed is None else str(made.seed)
        self.armed[self._count] = Armed(self._count, made, seed)
        self.changed()
        return self._count

    def remove(self, number: int) -> bool:
        """Disarm a fault; return whether there was one of that number."""
        found = self.armed.pop(number, None)
        self.changed()
        return found is not None

    def clear(self) -> None:
        """Disarm all."""
        self.armed.clear()
        self.changed()

    def changed(self) -> None:
        """Called after each change; whoever must know of changes overrides it."""

    def due(self, at: Moment, now: Situation) -> Iterator[Armed]:
        """Yield the faults that happen to a request at this moment, in the order of arming; what is yielded has happened."""
        for one in list(self.armed.values()):
            if not one.fault.befalls(at, now) or one.fault.kind == "refuse":
                continue
            if one.fault.rate is not None and one.chance.random() >= one.fault.rate:
                continue
            one.fired += 1
            self.happened[f"{one.fault.kind}@{at}"] += 1
            if one.left is not None:
                one.left -= 1
                if not one.left:
                    self.armed.pop(one.number, None)
            yield one
