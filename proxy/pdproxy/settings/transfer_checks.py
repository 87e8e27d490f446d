"""What connectors ask of the settings that no single field can tell: where KV is received, and how much of it fits.

Owns those rules for all connectors. They run once every URL is in its one spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from pdproxy.settings.errors import KeyPath, SettingsError, spell_key
from pdproxy.settings.schema import Node, Pool, Receiver

NEED_IDS = ("lmcache-pd", "kvstore-keys")
"""Connectors whose prefill legs are made of token ids."""
TAKE_IDS = ("nixl", *NEED_IDS)
"""Connectors whose legs may carry ids that were made here."""


def receiver_host(node: Node) -> str:
    """Return the host on which a decode engine receives KV."""
    return node.receiver.host or urlsplit(node.url).hostname or ""


def check_transfer(pool: Pool, nodes: Sequence[Node], path: KeyPath) -> None:
    """Hold a pool's nodes against what its connector needs.

    Raises:
        SettingsError: naming the key.
    """
    if pool.tokenize == "off" and pool.connector in NEED_IDS:
        key = spell_key((*path, "tokenize"))
        raise SettingsError(
            f"{key}: connector {pool.connector} needs prompts' token ids: expected auto or always, got off"
        )
    if pool.tokenize == "always" and pool.connector not in TAKE_IDS:
        key = spell_key((*path, "tokenize"))
        raise SettingsError(f"{key}: connector {pool.connector} takes no token ids: expected off or auto, got always")
    pushed = pool.connector == "lmcache-pd"
    taken: dict[tuple[str, int], str] = {}
    for index, node in enumerate(nodes):
        key = spell_key((*path, "nodes", index, "receiver"))
        if node.receiver != Receiver() and not (pushed and node.role == "decode"):
            raise SettingsError(f"{key}: only a decode engine of connector lmcache-pd has one")
        if pushed and node.role == "decode":
            _check_receiver(node, key, taken)
    lmcache = pool.lmcache
    key = spell_key((*path, "lmcache"))
    if (lmcache.pd_buffer_size is None) != (lmcache.kv_bytes_per_token is None):
        raise SettingsError(f"{key}: pd_buffer_size and kv_bytes_per_token are of use together alone")
    if lmcache.pd_buffer_size is not None and lmcache.kv_bytes_per_token is not None:
        chunk = lmcache.kv_bytes_per_token * lmcache.chunk_size
        if lmcache.pd_buffer_size < chunk:
            raise SettingsError(f"{key}.pd_buffer_size: {lmcache.pd_buffer_size} bytes hold no chunk of {chunk} bytes")


def _check_receiver(node: Node, key: str, taken: dict[tuple[str, int], str]) -> None:
    receiver = node.receiver
    if not receiver.init_ports or not receiver.alloc_ports:
        raise SettingsError(
            f"{key}: connector lmcache-pd needs init_ports and alloc_ports of {node.url} (LMCache's pd_peer_init_port and "
            "pd_peer_alloc_port; as flags --receiver-init-port and --receiver-alloc-port)"
        )
    if len(receiver.init_ports) != len(receiver.alloc_ports):
        raise SettingsError(
            f"{key}: {len(receiver.init_ports)} init_ports, but {len(receiver.alloc_ports)} alloc_ports: a rank has one of both"
        )
    host = receiver_host(node)
    for port in (*receiver.init_ports, *receiver.alloc_ports):
        if (other := taken.get((host, port))) is not None:
            raise SettingsError(f"{key}: port {port} of {host} is given twice (also by {other}): each rank has its own")
        taken[host, port] = key
