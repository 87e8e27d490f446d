"""All contracts that the proxy can run. A new one is a module with an `ENTRY`, and an entry in
`_OWN`.

Other packages bring contracts, too: by entry points of the group `pdproxy.connectors`
(docs/guide/policies.md).

The order matters in one place: where several contracts serve one `kv_connector`, the first is
chosen if the operator names none.
"""

from __future__ import annotations

from pdproxy.kit.plugins import PluginError, plugins
from pdproxy.transfer import (
    cpu,
    kvstore_keys,
    lmcache_mp,
    lmcache_pd,
    mooncake,
    moriio,
    nixl,
    nixl_push,
    p2p_nccl,
    shared,
)
from pdproxy.transfer.entry import Entry

_OWN: tuple[Entry, ...] = (
    nixl.ENTRY,
    nixl_push.ENTRY,
    mooncake.ENTRY,
    lmcache_pd.ENTRY,
    lmcache_mp.ENTRY,
    shared.ENTRY,
    kvstore_keys.ENTRY,
    cpu.ENTRY,
    moriio.ENTRY,
    p2p_nccl.ENTRY,
)


def _of_others() -> list[Entry]:
    """Return the contracts of other packages.

    Raises:
        PluginError: one of them can't be used.
    """
    found: list[Entry] = []
    for name, entry in plugins("pdproxy.connectors", [one.name for one in _OWN]).items():
        if not isinstance(entry, Entry) or entry.name != name:
            raise PluginError(
                f"the plugin {name!r} of pdproxy.connectors is no `Entry` of this name"
            )
        found.append(entry)
    return found


ENTRIES: tuple[Entry, ...] = (*_OWN, *_of_others())

AUTO = "auto"
"""`pools[].connector`: the contract is found by asking the engines."""


def choices() -> tuple[str, ...]:
    """Return what `pools[].connector` can be."""
    return (*names(), AUTO)


def names() -> tuple[str, ...]:
    """Return the names of all contracts."""
    return tuple(entry.name for entry in ENTRIES)


def entry_of(name: str) -> Entry:
    """Return the entry of a contract.

    Raises:
        KeyError: there is no contract of that name.
    """
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    raise KeyError(name)


def ignores_salt(name: str) -> bool:
    """Return whether engines with this contract may find another tenant's KV outside of their own
    caches (`Entry.ignores_salt`).

    Raises:
        KeyError: there is no contract of that name.
    """
    return entry_of(name).ignores_salt


def serving(kv_connector: str) -> tuple[str, ...]:
    """Return the names of the contracts that engines with this `kv_connector` can run, the usual
    one first.
    """
    return tuple(entry.name for entry in ENTRIES if kv_connector in entry.kv_connectors)
