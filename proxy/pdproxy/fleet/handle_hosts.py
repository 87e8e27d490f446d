"""Which hosts a KV handle may name: those at which an engine may be (`engines.networks`).

An engine that has been taken over could name any host in its handle, and the engine that reads the
KV would connect there. A handle that names another host is none: the prompt is served as if the
engine had given no handle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.kit.engine_networks import EngineNetworks
from pdproxy.kit.text import truncate
from pdproxy.transfer.contract import Handle
from pdproxy.transfer.peers import Peer
from pdproxy.transfer.turns import DecodeHandle


class _Named(msgspec.Struct):
    """`remote_hosts`: the hosts of MoRIIO's ranks on several machines. Values of any type: vLLM
    makes texts of them.
    """

    remote_host: str | None = None
    remote_hosts: Any = None


_named = msgspec.json.Decoder(_Named | None).decode
_H = TypeVar("_H", Handle, DecodeHandle)
MAX_KNOWN = 4096
"""Hosts that are remembered: an engine names one or two."""
_MAX_HOSTS = 256
"""Hosts of one handle."""
_MAX_HOST = 255
"""Characters of a host: as many as the longest name has (RFC 1035). A longer host is not
remembered.
"""


class HandleHosts:
    """Looks at what engines name. `engine` returns an engine by its URL, None if there is none."""

    def __init__(self, networks: EngineNetworks, engine: Callable[[str], Engine | None]) -> None:
        self._networks = networks
        self._engine = engine
        self._known: dict[str, str | None] = {}

    def checked(self, handle: _H | str, url: str) -> _H | str:
        """Return a handle of the engine at a URL, or why it may not be used."""
        if isinstance(handle, str) or not handle.params:
            return handle
        try:
            named = _named(handle.params)
        except msgspec.MsgspecError:
            # of a contract whose handles name no host: those with one have read it as a text
            return handle
        except (UnicodeDecodeError, RecursionError) as error:
            return f"kv_transfer_params can't be read: {error}"
        if named is None:
            return handle
        if named.remote_hosts and (found := self._why_not_all(named.remote_hosts, url)) is not None:
            return found
        host = named.remote_host
        if host is None or self._known.get(host, host) is None:  # None: known to be allowed
            return handle
        why = self.why_not(host, url)
        return handle if why is None else why

    def why_not(self, host: str, url: str) -> str | None:
        """Return why an engine may not name a host, None if it may. One that the settings replace
        may be any.
        """
        why = self._refused(host, url)
        return None if why is None or self._is_replaced(url) else why

    def _why_not_all(self, hosts: object, url: str) -> str | None:
        texts = list(map(str, hosts)) if isinstance(hosts, list) else [str(hosts)]
        if len(texts) > _MAX_HOSTS:
            return f"it names more than {_MAX_HOSTS} hosts"
        return next((why for host in texts if (why := self._refused(host, url)) is not None), None)

    def _refused(self, host: str, url: str) -> str | None:
        why: str | None
        if len(host) > _MAX_HOST:
            why = f"longer than {_MAX_HOST} characters"
        elif host in self._known:
            why = self._known[host]
        else:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            why = self._known[host] = self._networks.why_not_named(host)
        if why is None or host == urlsplit(url).hostname:
            return None
        return f"it names the host {truncate(host, 64)!r}: {why}"

    def of_peers(self, peers: tuple[Peer, ...] | str, url: str) -> tuple[Peer, ...] | str:
        """Return the ranks of an engine that has registered, or why its registration can't be
        used.
        """
        if isinstance(peers, str):
            return peers
        for peer in peers:
            if peer.host is not None and (why := self.why_not(peer.host, url)) is not None:
                return f"can't be used: {why}"
        return peers

    def _is_replaced(self, url: str) -> bool:
        engine = self._engine(url)
        return engine is not None and engine.kv_host is not None
