"""What one process calls in another: a call of a method is one item of a link.

Whoever sends names the method, and whoever receives says which object is called. What is sent are
the method's arguments, by the types of their annotations: there is no class of its own for each
message, and a type checker sees both sides.

A method is `told`, or it is `asked`: then its first argument is the number of the question, which
the answer has, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import cache, reduce
from operator import or_
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from pdproxy.kit.errors import (
    EnginesLostError,
    LimitError,
    OverloadedError,
    RefusalReason,
    TooLateError,
)

R = TypeVar("R")
Answer: TypeAlias = R | Coroutine[Any, Any, R]
"""What a method that is asked returns: its answer, or a coroutine that returns its answer."""
AnyMethod = TypeVar("AnyMethod", bound=Callable[..., Any])


class Call(msgspec.Struct, array_like=True):
    """A call. The arguments are fields of its method's own class. `on`: the number of the pool
    whose object is called, 0 where there is one object.
    """

    on: int


class Reply(msgspec.Struct, array_like=True):
    """The answer to a question. `value`: in the class of its method, of the type of its answer."""

    number: int
    value: Any


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The error in which a question has ended. `kind`: see `_KINDS`."""

    number: int
    kind: int
    text: str
    reason: str
    retry_after: float | None


_KINDS: tuple[type[OverloadedError], ...] = (
    OverloadedError,
    TooLateError,
    LimitError,
    EnginesLostError,
)


def refused(number: int, error: OverloadedError) -> Refused:
    """Return what is sent for an error."""
    kind = _KINDS.index(type(error)) if type(error) in _KINDS else 0
    reason = error.reason or RefusalReason.NO_ENGINE
    return Refused(number, kind, error.message, reason.value, error.retry_after)


def error_of(told: Refused) -> OverloadedError:
    """Return the error that was sent."""
    kind = _KINDS[told.kind]
    if kind is TooLateError:
        return TooLateError(told.text)
    if kind is EnginesLostError:
        return EnginesLostError(told.text, retry_after=told.retry_after)
    return kind(told.text, RefusalReason(told.reason), retry_after=told.retry_after)


# -- methods


class _Method:
    """A method that other processes call. `reply` makes an answer, None where it has none."""

    def __init__(self, method: Callable[..., Any], *, is_asked: bool) -> None:
        self.owner, _, self.name = method.__qualname__.rpartition(".")
        self.is_asked = is_asked
        self._method = method
        self.reply: Callable[[int, Any], Reply] | None = None
        self.keywords = 0
        """How many of its arguments, the last ones, are passed by their names."""
        self.types: tuple[Any, ...] = ()
        CALLS[method] = self._make_and_call

    def _make_and_call(self, *args: object, **kwargs: object) -> Call:
        self.make()
        return CALLS[self._method](*args, **kwargs)

    def make(self) -> None:
        """Make the classes of its calls and of its answers. Only now all names in annotations are
        known.
        """
        if self.types:
            return
        hints, fields = get_type_hints(self._method), list[Any]()
        for one in [*inspect.signature(self._method).parameters.values()][1:]:
            default = () if one.default is one.empty else (one.default,)
            fields.append((one.name, hints[one.name], *default))
            self.keywords += one.kind is one.KEYWORD_ONLY
        tag = f"{self.owner}.{self.name}"
        call = msgspec.defstruct(self.name, fields, bases=(Call,), tag=tag, array_like=True)
        CALLS[self._method], self.types = cast("type[Call]", call), (call,)
        if self.is_asked:
            value = [("value", _answer(hints["return"]))]
            reply = msgspec.defstruct(
                self.name, value, bases=(Reply,), tag=f"{tag}=", array_like=True
            )
            self.reply, self.types = cast("Callable[[int, Any], Reply]", reply), (call, reply)

    def runs(self, target: object) -> Callable[[Call], Any]:
        """Return what does a call of this method on an object."""
        method, astuple = getattr(target, self.name), msgspec.structs.astuple
        if not self.keywords:
            return lambda item: method(*astuple(item)[1:])
        count = -self.keywords
        names = self.types[0].__struct_fields__[count:]

        def run(item: Call) -> object:
            values = astuple(item)
            by_name = dict(zip(names, values[count:], strict=True))
            return method(*values[1:count], **by_name)

        return run


_METHODS: list[_Method] = []
CALLS: dict[object, Callable[..., Call]] = {}
"""By methods: what makes a call, of the number of the object and the arguments."""


def told(method: AnyMethod) -> AnyMethod:
    """Mark a method as one that other processes call, and that answers nothing."""
    _METHODS.append(_Method(method, is_asked=False))
    return method


def asked(method: AnyMethod) -> AnyMethod:
    """Mark a method as one that other processes call for its answer. It raises OverloadedError."""
    _METHODS.append(_Method(method, is_asked=True))
    return method


def methods_of(owner: type) -> list[_Method]:
    """Return the methods of a class that other processes call."""
    found = [one for one in _METHODS if one.owner == owner.__qualname__]
    for method in found:
        method.make()
    return found


def _answer(returned: object) -> object:
    """Return T for `Answer[T]`."""
    parts = get_args(returned)
    others = [one for one in parts if get_origin(one) is not Coroutine]
    return returned if len(others) == len(parts) else reduce(or_, others)


# -- as bytes

_PLAIN: dict[type, tuple[Callable[[Any], object], Callable[[Any], object]]] = {}


def plain(
    kind: type, to_plain: Callable[[Any], object], from_plain: Callable[[Any], object]
) -> None:
    """Have objects of a type, which msgspec does not know, be sent as something that it knows."""
    _PLAIN[kind] = to_plain, from_plain


def _encoded(value: object) -> object:
    if (known := _PLAIN.get(type(value))) is None:
        raise TypeError(type(value).__name__)
    return known[0](value)


def _decoded(wanted: type, value: object) -> object:
    if (known := _PLAIN.get(wanted)) is None:
        raise TypeError(wanted.__name__)
    return known[1](value)


encode_item = msgspec.msgpack.Encoder(enc_hook=_encoded).encode
"""Returns an item as bytes."""


def decoder() -> Callable[[bytes], list[Call | Reply | Refused]]:
    """Return what returns the items of a message. Raises msgspec.MsgspecError."""
    return _decoder(len(_METHODS))


@cache
def _decoder(_: int) -> Callable[[bytes], list[Call | Reply | Refused]]:
    items: Any = Refused
    for method in _METHODS:
        method.make()
        items = reduce(or_, method.types, items)
    return msgspec.msgpack.Decoder(list[items], dec_hook=_decoded).decode
