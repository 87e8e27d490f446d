"""The address of the admin API: its forms, and when it needs a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from pdproxy.kit.addresses import is_loopback
from pdproxy.settings.errors import Mistakes

UNIX = "unix:"
AdminAddress = Annotated[
    str,
    Meta(
        pattern=r"\A(unix:[^\x00]+|[^\s/\[\]:]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5})\Z",
        description="unix:PATH or HOST:PORT",
    ),
]


class AdminPlace(NamedTuple):
    """Where the admin API is: the path of a Unix socket, or host and port; the others are None."""

    path: str | None
    host: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"{UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in str(self.host) else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.path is not None or is_loopback(str(self.host))


def place_of(address: str) -> AdminPlace:
    """Return the place that an address of the form `AdminAddress` names.

    Raises:
        ValueError: the port is none.
    """
    if address.startswith(UNIX):
        return AdminPlace(address.removeprefix(UNIX))
    host, _, port = address.rpartition(":")
    if not 0 < int(port) < 65_536:
        raise ValueError(f"no port is {port}")
    return AdminPlace(None, host.strip("[]"), int(port))


def check_admin(address: str | None, keys: Sequence[str], file: str | None, found: Mistakes) -> None:
    """Check `listen.admin` with its keys (`auth.admin_keys` and the file of more)."""
    here = ("listen", "admin")
    if address is not None:
        try:
            place = place_of(address)
        except ValueError as error:
            found.add(here, f"listen.admin: {error}{found.source(here)}")
        else:
            if not place.is_local and not keys and file is None:
                text = "others than this machine can reach it: give it keys (auth.admin_keys or auth.admin_keys_file)"
                found.add(here, f"listen.admin: {place}: {text}{found.source(here)}")
