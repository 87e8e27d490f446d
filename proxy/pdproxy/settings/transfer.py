"""What a pool's contract needs of several settings together: where KV is received, how much of it
fits, who works with whom.

Owns these rules for all contracts. They run after every URL has its normal spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from pdproxy.scheduling.ledger_engine import REVISION
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, quote, spell_key
from pdproxy.settings.kv import ReceiverSettings
from pdproxy.settings.pools import Pool
from pdproxy.transfer import encoders, registry
from pdproxy.transfer.contract import Capabilities
from pdproxy.transfer.peers import PeerSource
from pdproxy.wire.registrations import place


def receiver_host(node: ConfiguredEngine) -> str:
    """Return the host on which a decode engine receives KV."""
    return node.receiver.host or urlsplit(node.url).hostname or ""


def bootstrap_address(node: ConfiguredEngine, pool: Pool) -> str | None:
    """Return the address of an engine's bootstrap server, None if it has none that the pool's
    contract uses.
    """
    if (
        not node.prefills
        or registry.entry_of(pool.connector).capabilities.peers_from is not PeerSource.BOOTSTRAP
    ):
        return None
    if node.facts.bootstrap is not None:
        return node.facts.bootstrap.rstrip("/")
    host = urlsplit(node.url).hostname or ""
    return (
        f"http://[{host}]:{pool.bootstrap_port}"
        if ":" in host
        else f"http://{host}:{pool.bootstrap_port}"
    )


def check_transfer(
    pool: Pool, nodes: Sequence[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> None:
    """Check a pool and its nodes against what its contract needs. Mistakes are added to `found`."""
    if pool.connector == registry.AUTO:
        return  # checked once the engines have been asked
    can = registry.entry_of(pool.connector).capabilities
    key, where = (*path, "tokenize"), found.source((*path, "tokenize"))
    if pool.tokenize == "off" and can.needs_ids:
        text = (
            f"connector {pool.connector} needs prompts' token ids: expected auto or always, got off"
        )
        found.add(key, f"{spell_key(key)}: {text}{where}")
    if pool.tokenize == "always" and not can.takes_ids:
        text = f"connector {pool.connector} takes no token ids: expected off or auto, got always"
        found.add(key, f"{spell_key(key)}: {text}{where}")
    key, where = (*path, "dispatch"), found.source((*path, "dispatch"))
    if pool.dispatch is not None and pool.dispatch not in can.orders:
        text = (
            f"connector {pool.connector} can't: expected {' or '.join(can.orders)}, got "
            f"{pool.dispatch}"
        )
        found.add(key, f"{spell_key(key)}: {text}{where}")
    _check_turns(pool, can, path, found)
    _check_roles(pool, can, nodes, path, found)
    _check_encoders(pool, nodes, path, found)
    if not can.names_host:
        named = [
            (*path, "nodes", index, "facts", "remote_host")
            for index, n in enumerate(nodes)
            if n.facts.remote_host
        ]
        for key in [*([(*path, "remote_host")] if pool.remote_host != "engine" else []), *named]:
            text = f"the KV handles of connector {pool.connector} name no host"
            found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
    _check_bootstraps(pool, nodes, path, found)
    taken: dict[tuple[str, int], str] = {}
    for index, node in enumerate(nodes):
        key = (*path, "nodes", index, "receiver")
        if node.receiver != ReceiverSettings() and not (
            can.needs_receiver and node.role == "decode"
        ):
            pushing = [
                entry.name for entry in registry.ENTRIES if entry.capabilities.needs_receiver
            ]
            text = f"only a decode engine of connector {' or '.join(pushing)} has one"
            found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
        if can.needs_receiver and node.role == "decode":
            with found.collecting(*key):
                _check_receiver(pool, node, spell_key(key), taken, found.source(key))
    _check_addresses(can.peers_from is PeerSource.REGISTRATION, nodes, path, found)
    lmcache = pool.lmcache
    key, where = (*path, "lmcache"), found.source((*path, "lmcache"))
    if (lmcache.pd_buffer_size is None) != (lmcache.kv_bytes_per_token is None):
        found.add(
            key,
            f"{spell_key(key)}: pd_buffer_size and kv_bytes_per_token must be given "
            f"together{where}",
        )
    if lmcache.pd_buffer_size is not None and lmcache.kv_bytes_per_token is not None:
        chunk = lmcache.kv_bytes_per_token * lmcache.chunk_size
        if lmcache.pd_buffer_size < chunk:
            text = f"{lmcache.pd_buffer_size} bytes are less than one chunk of {chunk} bytes"
            found.add(key, f"{spell_key(key)}.pd_buffer_size: {text}{where}")


def _check_roles(
    pool: Pool, can: Capabilities, nodes: Sequence[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> None:
    """Check that the connector's engines can do what the settings want of each."""
    for index, node in enumerate(nodes):
        key = (*path, "nodes", index, "role")
        if node.role == "any" and not can.any_role:
            able = [one.name for one in registry.ENTRIES if one.capabilities.any_role]
            text = (
                f"an engine of connector {pool.connector} has one role, only those of "
                f"{', '.join(able)} can be any"
            )
            found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
        key = (*path, "nodes", index, "serves_whole")
        if node.serves_whole and not can.whole_on_prefill and node.role == "prefill":
            text = f"a prefill engine of connector {pool.connector} can't serve a request whole"
            found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")


def _check_encoders(
    pool: Pool, nodes: Sequence[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> None:
    """Check that engines which are sent encoder outputs have an address, and no others."""
    pushes = encoders.CONTRACTS[pool.ec_connector].pushes
    encodes = any(node.encodes for node in nodes)
    for index, node in enumerate(nodes):
        key = (*path, "nodes", index, "facts", "ec_address")
        given, where = node.facts.ec_address, found.source(key)
        receives = pushes and node.role not in ("encode", "decode")
        if given is None and receives and encodes and not node.is_source:
            text = f"missing: with ec_connector {pool.ec_connector} it receives encoder outputs"
            found.add(key, f"{spell_key(key)}: {text}{where}")
        elif given is not None and not receives:
            names = [one.name for one in encoders.CONTRACTS.values() if one.pushes]
            text = (
                f"only an engine of ec_connector {' or '.join(names)} that uses encoder outputs "
                f"has one"
            )
            found.add(key, f"{spell_key(key)}: {text}{where}")
        elif given is not None and place(given) is None:
            found.add(key, f"{spell_key(key)}: {quote(given)}: expected host:port{where}")


def check_pairs(
    pool: Pool, nodes: Sequence[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> None:
    """Check which decode engines take the KV of each prefill engine, by sources in their normal
    spelling.
    """
    if pool.connector == registry.AUTO:
        return
    can = registry.entry_of(pool.connector).capabilities
    _check_parallel_sizes(pool, nodes, path, found)
    if not can.one_receiver:
        return
    for index, node in enumerate(nodes):
        decodes = [other.url for other in nodes if other.decodes and _takes(other, node, pool)]
        if node.prefills and len(decodes) > 1:
            key, where = (*path, "nodes", index), found.source((*path, "nodes", index))
            text = (
                f"with connector {pool.connector} {node.url} pushes KV to one decode engine, but "
                f"{' and '.join(decodes[:4])} "
                "take its KV: name it in the sources of the one that it pushes to"
            )
            found.add(key, f"{spell_key(key)}: {text}{where}")


def pairs_to_try(pool: Pool) -> list[tuple[ConfiguredEngine, ConfiguredEngine]]:
    """Return the prefill and decode engines of a pool that are tried together: those that the
    settings let work together.

    Of engines for any role, each makes KV for the next one that may take it, and takes the KV of
    the nearest one before it that it may take: all are tried in both roles, without a try for each
    of n x n pairs.
    """
    both = [node for node in pool.nodes if node.role == "any"]
    ring: set[tuple[str, str]] = set()
    for at, node in enumerate(both):
        others = [*both[at + 1 :], *both[:at]]
        after = next((other for other in others if _takes(other, node, pool)), None)
        before = next((other for other in reversed(others) if _takes(node, other, pool)), None)
        if after is not None:
            ring.add((node.url, after.url))
        if before is not None:
            ring.add((before.url, node.url))
    return [
        (prefill, decode)
        for prefill in pool.nodes
        for decode in pool.nodes
        if prefill.prefills
        and decode.decodes
        and prefill is not decode
        and _takes(decode, prefill, pool)
        and (not (prefill.role == decode.role == "any") or (prefill.url, decode.url) in ring)
    ]


def _check_parallel_sizes(
    pool: Pool, nodes: Sequence[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> None:
    """Check the tensor-parallel sizes of engines that work together, where both are given."""
    if pool.lmcache.first_rank_only:
        return  # the first rank has the KV of all
    mixed = registry.entry_of(pool.connector).capabilities.mixed_parallel_sizes
    sizes = {node.facts.tensor_parallel_size for node in nodes} - {None}
    if len(sizes) < 2:
        # most pools: looking at all pairs of 400 engines takes 30 ms, and is done for each that is
        # added
        return
    for index, decode in enumerate(nodes):
        ours = decode.facts.tensor_parallel_size
        if ours is None or not decode.decodes:
            continue
        for prefill in nodes:
            theirs = prefill.facts.tensor_parallel_size
            if (
                theirs is None
                or ours == theirs
                or (mixed and max(ours, theirs) % min(ours, theirs) == 0)
            ):
                continue
            if decode is prefill or not (prefill.prefills and _takes(decode, prefill, pool)):
                continue
            key = (*path, "nodes", index, "facts", "tensor_parallel_size")
            rule = (
                "one must be a multiple of the other"
                if mixed
                else f"{pool.connector} needs the same"
            )
            found.add(
                key,
                f"{spell_key(key)}: {ours}, but {prefill.url} has {theirs}: "
                f"{rule}{found.source(key)}",
            )


def within(node: ConfiguredEngine, pool: Pool) -> tuple[tuple[str, str | None], ...]:
    """Return the labels that an engine must have in common with those that it shares work with."""
    names = pool.pair_within
    if names is None:
        names = (REVISION,) if REVISION in node.labels else ()
    return tuple((name, node.labels.get(name)) for name in names)


def _takes(decode: ConfiguredEngine, prefill: ConfiguredEngine, pool: Pool) -> bool:
    return (not decode.sources or prefill.url in decode.sources) and within(decode, pool) == within(
        prefill, pool
    )


def _check_turns(pool: Pool, can: Capabilities, path: KeyPath, found: Mistakes) -> None:
    turns, key = pool.turns, (*path, "turns")
    if turns.bidirectional and not can.hands_back:
        name, able = (
            (*key, "bidirectional"),
            [one.name for one in registry.ENTRIES if one.capabilities.hands_back],
        )
        text = (
            f"connector {pool.connector} can't hand KV back to prefill engines, only "
            f"{' and '.join(able)} can"
        )
        found.add(name, f"{spell_key(name)}: {text}{found.source(name)}")
    elif turns.bidirectional and pool.tokenize == "off":
        name = (*path, "tokenize")
        text = "turns.bidirectional needs prompts' token ids: expected auto or always, got off"
        found.add(name, f"{spell_key(name)}: {text}{found.source(name)}")
    if turns.margin >= turns.decoder_kv_blocks_ttl:
        name = (*key, "margin")
        text = (
            f"{turns.margin:g} s leave nothing of decoder_kv_blocks_ttl = "
            f"{turns.decoder_kv_blocks_ttl:g} s"
        )
        found.add(name, f"{spell_key(name)}: {text}{found.source(name)}")


def _check_bootstraps(
    pool: Pool, nodes: Sequence[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> None:
    """Check that each prefill engine has a bootstrap server of its own, if it has one. Two engines
    can't share an answer.
    """
    taken: dict[str, str] = {}
    for index, node in enumerate(nodes):
        key = (*path, "nodes", index, "facts", "bootstrap")
        given, where = node.facts.bootstrap, found.source(key)
        if given is not None and not _is_address(given):
            found.add(key, f"{spell_key(key)}: {quote(given)}: expected http://host:port{where}")
            continue
        if (address := bootstrap_address(node, pool)) is None:
            continue
        if (other := taken.setdefault(address, node.url)) != node.url:
            text = (
                f"{address} would be the bootstrap server of {other}, too: give each prefill "
                f"engine its own"
            )
            found.add(key, f"{spell_key(key)}: {text}{where}")


def _is_address(text: str) -> bool:
    """Return whether a text is `http://host:port`."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    plain = text.isascii() and text.isprintable() and " " not in text and "@" not in text
    rest = parts.path not in ("", "/") or "?" in text or "#" in text
    return plain and not rest and parts.scheme == "http" and bool(parts.hostname) and bool(port)


def _check_addresses(
    registers: bool, nodes: Sequence[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> None:
    """Check the addresses that engines register: each is one engine's, and none is set where
    engines do not register.
    """
    first: dict[str | None, str] = {}
    for index, node in enumerate(nodes):
        key, given = (*path, "nodes", index, "facts", "registered_as"), node.facts.registered_as
        where = found.source(key)
        if given is not None and not registers:
            names = [entry.name for entry in registry.ENTRIES if entry.registration_port]
            found.add(
                key,
                f"{spell_key(key)}: only engines of connector {' or '.join(names)} register{where}",
            )
        elif given is not None and place(given) is None:
            found.add(key, f"{spell_key(key)}: {quote(given)}: expected host:port{where}")
        elif registers:
            address = place(given or node.url)
            if address in first:
                found.add(
                    key,
                    f"{spell_key(key)}: {address} is also the address of {first[address]}{where}",
                )
            first.setdefault(address, spell_key((*path, "nodes", index)))


def _check_receiver(
    pool: Pool, node: ConfiguredEngine, key: str, taken: dict[tuple[str, int], str], where: str
) -> None:
    receiver = node.receiver
    if not receiver.init_ports or not receiver.alloc_ports:
        raise SettingsError(
            f"{key}: connector {pool.connector} needs init_ports and alloc_ports of {node.url} "
            f"(LMCache's pd_peer_init_port and "
            f"pd_peer_alloc_port; as flags --receiver-init-port and --receiver-alloc-port){where}"
        )
    if len(receiver.init_ports) != len(receiver.alloc_ports):
        raise SettingsError(
            f"{key}: {len(receiver.init_ports)} init_ports, but {len(receiver.alloc_ports)} "
            f"alloc_ports: expected one of "
            f"each per rank{where}"
        )
    host = receiver_host(node)
    for port in (*receiver.init_ports, *receiver.alloc_ports):
        if (other := taken.get((host, port))) is not None:
            raise SettingsError(
                f"{key}: port {port} of {host} is given twice (also by {other}): each rank needs "
                f"its own{where}"
            )
        taken[host, port] = key
