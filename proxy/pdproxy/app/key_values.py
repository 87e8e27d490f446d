"""What files of keys hold, where it is told: the process does not read them then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from pdproxy.app.valid_keys import ValidKeys

KeyValue = ValidKeys | str
"""The keys of clients or operators, or the one key or secret of a file."""

T = TypeVar("T", bound=KeyValue)


class ToldKeys:
    """The values that were told, by their names: see `Credentials.key_values`."""

    def __init__(self, values: Mapping[str, KeyValue]) -> None:
        self._values = dict(values)

    def __repr__(self) -> str:
        return f"<ToldKeys of {len(self._values)} files>"

    def take(self, values: Mapping[str, KeyValue]) -> None:
        """Take newer values."""
        self._values |= values

    def of(self, name: str, read: Callable[[], T]) -> Callable[[], T]:
        """Return what returns the newest value. One that was not told yet is read now, once.

        Raises:
            SettingsError: it can't be read.
        """
        if name not in self._values:
            self._values[name] = read()
        return lambda: cast("T", self._values[name])
