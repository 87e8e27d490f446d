"""The base class of all sections of the settings, the types of single values, and what is declared
at a setting.

A field declares its type with bounds, its default, below it what it means, and by marks in its
`Annotated` type whether a running proxy uses another value at once (`Live`), and its options of the
command line (`Option`). Everything else about a setting follows from that. Owns the bounds of
units. A value of the wrong kind is refused with its key before anything is built of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

Value = TypeVar("Value")
# No useful wait is longer than a week. The bound also keeps infinity out of the event loop's
# timers.
Seconds = Annotated[float, Meta(gt=0, le=604_800)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Text = Annotated[str, Meta(min_length=1)]
HIDDEN = "hidden"
"""The key in a type's `Meta.extra` that has its values masked where settings are shown: whoever
knows one can use it.
"""
# A key is sent in a header: a blank, a line break or a letter beyond ASCII in it could never match,
# or would split it.
Key = Annotated[
    str,
    Meta(
        pattern=r"\A[\x21-\x7e]+\Z",
        description="a key of visible ASCII characters without blanks",
        extra={HIDDEN: True},
    ),
]
File = Annotated[str, Meta(min_length=1, pattern=r"\A[^\x00]+\Z", description="a file's name")]
Host = Annotated[str, Meta(pattern=r"\A[^\s/\[\]]+\Z", description="a host name or a bare address")]
Port = Annotated[int, Meta(ge=1, le=65_535)]
HeaderName = Annotated[
    str, Meta(pattern=r"\A[!#-'*+.^_`|~0-9A-Za-z-]{1,100}\Z", description="a header's name")
]


def names_of(table: Callable[[], Iterable[str]]) -> Meta:
    """Return the annotation of a text that must be one of a table's names. `table` is called for
    each value that is checked.
    """
    return Meta(extra={NAMES: table})


NAMES = "names"
"""The key of that table in a type's `Meta.extra`."""
OffOrSeconds = Annotated[float, Meta(ge=0, le=604_800)]
"""Seconds; 0 turns it off."""


@dataclass(frozen=True, slots=True)
class Live:
    """Marks a setting of which a running proxy uses another value at once. Without a mark, another
    value needs a restart.

    `is_switch`: 0 turns something off, and to turn it off or on needs a restart. Files that
    settings name are read again anyway.
    """

    is_switch: bool = False

    def is_used(self, old: object, new: object) -> bool:
        """Return whether a new value is used at once."""
        return not self.is_switch or bool(old) == bool(new)


class WhileSame:
    """Marks a section: any change in it needs a restart if one of these attributes of the section
    around it changes, too.
    """

    def __init__(self, *names: str) -> None:
        self.of = attrgetter(*names)


class Option:
    """Gives a setting options of the command line: `Option("the help", "METAVAR", "--name",
    "--other-name")`.

    A help that depends on tables is a function. One without `(default: ...)` gets that of the
    field. Errors show the first name.
    """

    def __init__(self, words: str | Callable[[], str], metavar: str, *names: str) -> None:
        self.words = words
        self.metavar = metavar
        self.names = names


AtOnce = Annotated[Value, Live()]
"""A setting of which other values are used at once."""
Switch = Annotated[Value, Live(is_switch=True)]
"""A number of which other values are used at once, but for 0."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section: immutable, filled by name, without unknown fields."""

    former: ClassVar[Mapping[str, str]] = {}
    """The fields' names in earlier versions, each with the name now: they are refused with it."""

    @classmethod
    def of_text(cls, text: str) -> dict[str, object] | None:
        """Return the section's fields, if a text may stand in its place; None: not this one."""
        return None

    @classmethod
    def texts(cls) -> tuple[str, ...]:
        """Return the texts that may stand in its place."""
        return ()


class Field(NamedTuple):
    """A field of a section. `type`: without the project's own marks. `required`: it has no
    `default`, and must be given.
    """

    name: str
    type: Any
    required: bool
    default: object
    live: Live | None = None
    while_same: WhileSame | None = None
    option: Option | None = None


@cache
def fields_of(kind: Any) -> tuple[Field, ...]:
    """Return the fields of a section. msgspec evaluates all annotations anew at each call, which
    costs a millisecond.
    """
    return tuple(_field(field) for field in msgspec.structs.fields(kind))


def is_section(kind: Any) -> bool:
    """Return whether a type of the schema is a section."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def is_hidden(kind: Any) -> bool:
    """Return whether values of a type, or what they hold, are secrets."""
    marks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    if any(isinstance(one, Meta) and HIDDEN in (one.extra or {}) for one in marks):
        return True
    return any(is_hidden(one) for one in get_args(kind))


def _field(field: msgspec.structs.FieldInfo) -> Field:
    kind, marks = field.type, dict[str, Any]()
    if get_origin(kind) is Annotated:
        kind, *found = get_args(kind)
        for one in found:
            if (name := _MARKS.get(type(one))) is not None:
                marks[name] = one
            else:
                kind = Annotated[kind, one]
    made = field.default_factory
    default = None if field.required else field.default if made is msgspec.NODEFAULT else made()
    return Field(field.name, kind, field.required, default, **marks)


_MARKS = {Live: "live", WhileSame: "while_same", Option: "option"}
