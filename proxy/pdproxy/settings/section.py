"""The base class of all sections of the settings, and the types of single values.

Owns the bounds of units. A value of the wrong kind is refused with its key before anything is built of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

# No useful wait is longer than a week. The bound also keeps infinity out of the event loop's timers.
Seconds = Annotated[float, Meta(gt=0, le=604_800)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Text = Annotated[str, Meta(min_length=1)]
# A key is sent in a header: a blank, a line break or a letter beyond ASCII in it could never match, or would split it.
Key = Annotated[str, Meta(pattern=r"\A[\x21-\x7e]+\Z", description="a key of visible ASCII characters without blanks")]
File = Annotated[str, Meta(min_length=1, pattern=r"\A[^\x00]+\Z", description="a file's name")]
Host = Annotated[str, Meta(pattern=r"\A[^\s/\[\]]+\Z", description="a host name or a bare address")]
Port = Annotated[int, Meta(ge=1, le=65_535)]


def names_of(table: Callable[[], Iterable[str]]) -> Meta:
    """Return the annotation of a text that must be one of a table's names. `table` is called for each value that is checked."""
    return Meta(extra={NAMES: table})


NAMES = "names"
"""The key of that table in a type's `Meta.extra`."""


OffOrSeconds = Annotated[float, Meta(ge=0, le=604_800)]
"""Seconds; 0 turns it off."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section: immutable, filled by name, without unknown fields."""

    @classmethod
    def of_text(cls, text: str) -> dict[str, object] | None:
        """Return the section's fields, if a text may stand in its place; None: not this one."""
        return None

    @classmethod
    def texts(cls) -> tuple[str, ...]:
        """Return the texts that may stand in its place."""
        return ()
