"""Checks what a pool's contract needs of several settings together: where KV is received, and how much of it fits.

Owns these rules for all contracts. They run after every URL has its normal spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from pdproxy.settings.errors import KeyPath, SettingsError, spell_key
from pdproxy.settings.schema import Node, Pool, Receiver
from pdproxy.transfer import registry


def receiver_host(node: Node) -> str:
    """Return the host on which a decode engine receives KV."""
    return node.receiver.host or urlsplit(node.url).hostname or ""


def check_transfer(pool: Pool, nodes: Sequence[Node], path: KeyPath) -> None:
    """Check a pool and its nodes against what its contract needs.

    Raises:
        SettingsError: naming the key.
    """
    can = registry.entry_of(pool.connector).capabilities
    if pool.tokenize == "off" and can.needs_ids:
        key = spell_key((*path, "tokenize"))
        raise SettingsError(
            f"{key}: connector {pool.connector} needs prompts' token ids: expected auto or always, got off"
        )
    if pool.tokenize == "always" and not can.takes_ids:
        key = spell_key((*path, "tokenize"))
        raise SettingsError(f"{key}: connector {pool.connector} takes no token ids: expected off or auto, got always")
    taken: dict[tuple[str, int], str] = {}
    for index, node in enumerate(nodes):
        key = spell_key((*path, "nodes", index, "receiver"))
        if node.receiver != Receiver() and not (can.needs_receiver and node.role == "decode"):
            pushing = [entry.name for entry in registry.ENTRIES if entry.capabilities.needs_receiver]
            raise SettingsError(f"{key}: only a decode engine of connector {' or '.join(pushing)} has one")
        if can.needs_receiver and node.role == "decode":
            _check_receiver(pool, node, key, taken)
    lmcache = pool.lmcache
    key = spell_key((*path, "lmcache"))
    if (lmcache.pd_buffer_size is None) != (lmcache.kv_bytes_per_token is None):
        raise SettingsError(f"{key}: pd_buffer_size and kv_bytes_per_token must be given together")
    if lmcache.pd_buffer_size is not None and lmcache.kv_bytes_per_token is not None:
        chunk = lmcache.kv_bytes_per_token * lmcache.chunk_size
        if lmcache.pd_buffer_size < chunk:
            raise SettingsError(
                f"{key}.pd_buffer_size: {lmcache.pd_buffer_size} bytes are less than one chunk of {chunk} bytes"
            )


def _check_receiver(pool: Pool, node: Node, key: str, taken: dict[tuple[str, int], str]) -> None:
    receiver = node.receiver
    if not receiver.init_ports or not receiver.alloc_ports:
        raise SettingsError(
            f"{key}: connector {pool.connector} needs init_ports and alloc_ports of {node.url} (LMCache's pd_peer_init_port and "
            "pd_peer_alloc_port; as flags --receiver-init-port and --receiver-alloc-port)"
        )
    if len(receiver.init_ports) != len(receiver.alloc_ports):
        raise SettingsError(
            f"{key}: {len(receiver.init_ports)} init_ports, but {len(receiver.alloc_ports)} alloc_ports: expected one of "
            "each per rank"
        )
    host = receiver_host(node)
    for port in (*receiver.init_ports, *receiver.alloc_ports):
        if (other := taken.get((host, port))) is not None:
            raise SettingsError(
                f"{key}: port {port} of {host} is given twice (also by {other}): each rank needs its own"
            )
        taken[host, port] = key
