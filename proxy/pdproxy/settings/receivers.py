"""The flags for where decode engines receive KV, applied to the decode engines of the first pool.

Owns how the flags are read: a flag that is given once is for every decode engine; given several times, or as a list of hosts,
it is for each in turn. `0.0.0.0` is an address to bind, not one to send to: it means the host of the engine's URL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pdproxy.settings.conform import conform, json_list, parse
from pdproxy.settings.errors import KeyPath, SettingsError
from pdproxy.settings.section import Host, Port

ANY_ADDRESS = ("0.0.0.0", "::", "[::]")  # noqa: S104 - nothing is bound to it here


class ReceiverFlag(NamedTuple):
    """A flag: its name for errors, the field of `Receiver` that it sets, and a text for each time it was given."""

    option: str
    field: str
    texts: Sequence[str]


def put_receivers(pool: Mapping[str, Any], flags: Sequence[ReceiverFlag]) -> None:
    """Set the receivers of a pool's decode engines from flags.

    Raises:
        SettingsError: naming the flag.
    """
    decodes = [node for node in pool.get("nodes", ()) if node.get("role") == "decode"]
    for flag in flags:
        values = _values(flag)
        if not decodes:
            raise SettingsError(f"{flag.option}: no decode engine is configured")
        if len(values) not in (1, len(decodes)):
            raise SettingsError(
                f"{flag.option}: given for {len(values)} decode engines, but there are {len(decodes)}: give one for all, "
                "or one for each"
            )
        for index, node in enumerate(decodes):
            value = values[index % len(values)]
            if value is not None:
                node["receiver"] = {**(node.get("receiver") or {}), flag.field: value}


def _values(flag: ReceiverFlag) -> list[object]:
    where = f" ({flag.option})"
    if flag.field == "host":
        hosts = [host for text in flag.texts for host in _hosts(text.strip())]
        path: KeyPath = ("receiver", flag.field)
        return [None if host in ANY_ADDRESS else conform(host, Host, where, path) for host in hosts]
    kind = tuple[Port, ...]
    return [conform(parse(text, kind), kind, where, ("receiver", flag.field)) for text in flag.texts]


def _hosts(text: str) -> list[Any]:
    """Return the hosts of a flag: `a,b` or JSON. `[::]` is an address, not JSON."""
    given = json_list(text)
    return [host.strip() for host in text.split(",")] if given is None else given
