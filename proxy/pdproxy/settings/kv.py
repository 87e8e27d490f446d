"""How KV is transferred and kept: sections of a pool and of its engines, and of the sockets at
which engines reach the proxy.

Owns names, units, bounds and defaults, which are those of vLLM's and the connectors' own
configuration where these have some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from pdproxy.settings.errors import KeyPath, Mistakes, quote, spell_key
from pdproxy.settings.section import Count, Host, Option, Port, Seconds, Section, Text
from pdproxy.transfer import registry
from pdproxy.wire.kv_events import address_of

FirstTokenFrom = Literal["prefill", "decode"]

Topic = Annotated[str, Meta(max_length=1024)]

OnTimeout = Literal["recompute", "fail"]


class LMCache(Section, frozen=True):
    """Settings of lmcache-pd: names and defaults are those of LMCache's own configuration."""

    first_token: FirstTokenFrom = "prefill"  # noqa: S105 - a token of text
    """Which engine makes the answer's first token. prefill saves a step, but the decode engine
    still makes it for requests that need the parsers or depend on their own output (stop strings,
    penalties, seeds, grammars). decode: for all requests.
    """

    chunk_size: Count = 256
    """Tokens per chunk."""

    save_unfull_chunk: bool = False
    """Whether two engines serve a prompt that is shorter than a chunk. LMCache 0.5.6's PD mode
    moves partial chunks whatever its own setting says, unless its discard_partial_chunks is on:
    then no notice would come, and the prompt would wait in vain.
    """

    first_rank_only: bool = False
    """Whether the first rank stores the KV of all ranks (models with one latent KV for all heads)
    and sends the only notice.
    """

    pd_buffer_size: Count | None = None
    """Bytes of a decode engine's receive buffer. If this and kv_bytes_per_token are set, a prompt
    waits (deadlines.queue) for space in the buffer before its prefill. null: not known, no wait.
    """

    kv_bytes_per_token: Count | None = None
    """Bytes of KV per token on one rank: 2 x layers x KV heads x head size x bytes of the type,
    divided by the ranks.
    """


class Cpu(Section, frozen=True):
    """Settings of cpu."""

    block_size: Count = 16
    """Tokens per KV block of the decode engines (--block-size): a shorter prompt is not loaded, and
    served by one engine.
    """


class Turns(Section, frozen=True):
    """Conversations whose next turn hands the decode engine's KV back to a prefill engine
    (connector nixl).
    """

    bidirectional: bool = False
    """Whether all engines of the pool are started with bidirectional_kv_xfer. A prefill engine
    without it never answers a prompt with such KV: run `pdproxy check` first. Needs token ids:
    tokenize auto or always. For streams, the engines need the notifier (kv_ready.notifier).
    """

    decoder_kv_blocks_ttl: Seconds = 480.0
    """Seconds for which decode engines keep the KV: their option of this name."""

    margin: Seconds = 10.0
    """Seconds before that time is over in which the KV is not used any more. A prefill engine
    itself refuses it in the last 5.
    """

    min_tokens: Count = 64
    """Fewer tokens of KV are not transferred: vLLM's kv_recompute_threshold."""

    min_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The share of a turn's tokens that a prompt must have in common with it to use its KV, which
    can be used once: a prompt that only begins alike (a common system prompt) should leave it to
    the conversation itself.
    """

    max_kept: Count = 4096
    """Turns that are kept at the same time. The oldest is released for one more."""

    max_blocks: Count = 4096
    """KV blocks that are kept per decode engine, where other requests miss them. The oldest turns
    are released for more. Blocks that turns share count more than once.
    """

    max_bytes: Annotated[int, Meta(ge=2**16, le=2**40)] = 128 << 20
    """Bytes of token ids and handles that are held here, 4 to 7 per token."""


class Prefixes(Section, frozen=True):
    """What the proxy knows of engines' prefix caches: for policy prefix and placements that ask for
    it. Else nothing is kept.
    """

    former: ClassVar[Mapping[str, str]] = {"heal": "refresh"}
    unit: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens by which prompts are compared: the engines' block size, or a whole part of it."""

    max_blocks: Annotated[int, Meta(ge=1024, le=10**9)] = 2_000_000
    """Blocks of unit tokens of all engines that are kept of their KV events, some 150 bytes each;
    and as many of the prompts that were sent to engines without events. Beyond that the engines
    with the most lose some.
    """

    ttl: Seconds = 2.0
    """Seconds for which a prompt that was sent to an engine counts as cached there, before its
    events say so.
    """

    engine_blocks: Count = 8192
    """KV blocks of an engine that sends no events and does not report their number: its own prompts
    are known up to these.
    """

    refresh: bool = True
    """Whether a request asks its engine to report the blocks that it reuses (vllm_xargs), once the
    engine had more in its cache than its events have said: a message was lost, or came before the
    proxy listened.
    """


class KvEvents(Section, frozen=True):
    """Engines' reports of the blocks that they have cached (their `--kv-events-config`), over
    ZMQ.
    """

    enabled: bool = False
    """Whether they are read, where a policy or placement asks for it. Engines that publish none
    lose nothing by it; /ready names them.
    """

    endpoint: Text | None = None
    """Where an engine publishes, tcp://host:port, as in its own configuration: with * as the host,
    at the host of its URL. Further data-parallel ranks take the ports after it. null: as the engine
    answers to GET /kv_event_sources.
    """

    replay_endpoint: Text | None = None
    """Where it can be asked for lost messages, in the same way. null: as the engine answers, or
    nowhere if endpoint is given.
    """

    topic: Topic | None = None
    """The topic under which it publishes. null: as the engine answers, or the empty one if endpoint
    is given.
    """

    host: Host | None = None
    """Address to bind for engines that connect: those whose endpoint names a host, and one of these
    ports. Each needs its own topic. Anybody who reaches it can publish. null: nothing is bound, and
    the proxy connects to all endpoints.
    """

    port: Port = 5557
    """TCP port to bind. Further data-parallel ranks take the ports after it."""


class EngineKvEvents(Section, frozen=True):
    """One engine's KV events. What is set here overrides the pool's settings."""

    endpoint: Text | None = None
    """As the pool's."""

    replay_endpoint: Text | None = None
    """As the pool's."""

    topic: Topic | None = None
    """As the pool's."""


def _receivers() -> str:
    names = ", ".join(entry.name for entry in registry.ENTRIES if entry.capabilities.needs_receiver)
    return (
        f"only {names}: address where a decode engine receives KV, LMCache's pd_peer_host "
        f"(default: its URL's host)"
    )


class ReceiverSettings(Section, frozen=True):
    """Where a decode engine's ranks receive KV. LMCache's `pd_peer_init_port` and
    `pd_peer_alloc_port`, one port per rank.
    """

    host: Annotated[
        Host | None, Option(_receivers, "HOST", "--receiver-host", "--nixl-peer-host")
    ] = None
    """LMCache's pd_peer_host (--receiver-host). null: the host of the engine's URL."""

    init_ports: Annotated[
        tuple[Port, ...],
        Option(
            "LMCache's pd_peer_init_port: one TCP port per tensor-parallel rank, such as "
            "7300,7301 (default: none)",
            "PORTS",
            "--receiver-init-port",
            "--nixl-peer-init-port",
        ),
    ] = ()
    """LMCache's pd_peer_init_port (--receiver-init-port)."""

    alloc_ports: Annotated[
        tuple[Port, ...],
        Option(
            "LMCache's pd_peer_alloc_port: one TCP port per tensor-parallel rank, such as "
            "7400,7401 (default: none)",
            "PORTS",
            "--receiver-alloc-port",
            "--nixl-peer-alloc-port",
        ),
    ] = ()
    """LMCache's pd_peer_alloc_port (--receiver-alloc-port)."""


def _notifier() -> str:
    names = ", ".join(
        entry.name for entry in registry.ENTRIES if "notifier" in entry.options.__struct_fields__
    )
    return (
        f"whether the engines of connector {names} carry the file of `pdproxy notifier`: true or "
        f"false"
    )


def _registration() -> str:
    names = " and ".join(entry.name for entry in registry.ENTRIES if entry.registration_port)
    return f"address on which engines register, for {names}"


class KvReady(Section, frozen=True):
    """The port on which prefill engines report that KV is ready: a ZMQ socket, with lmcache-mp an
    HTTP listener.

    It is bound if the connector has such notices; if binding fails, the proxy does not start.
    """

    host: Annotated[
        Host,
        Option(
            "address on which the proxy takes the engines' notices that KV is ready",
            "HOST",
            "--kv-ready-host",
            "--nixl-proxy-host",
        ),
    ] = "127.0.0.1"
    """Address to bind (--kv-ready-host): every prefill rank must reach it. Anybody who reaches it
    can send notices.
    """

    port: Annotated[
        Port,
        Option(
            "TCP port on which the proxy takes these notices",
            "PORT",
            "--kv-ready-port",
            "--nixl-proxy-port",
        ),
    ] = 7500
    """TCP port (--kv-ready-port): LMCache's pd_proxy_port. LMCache's own example proxy uses
    8500.
    """

    notifier: Annotated[bool, Option(_notifier, "BOOL", "--kv-notifier")] = False
    """Whether engines of connector nixl have pdproxy's notifier (pdproxy notifier; --kv-notifier
    true). Then the socket is bound for them, too, and the engines report the state of KV.
    """

    early: bool = False
    """With the notifier: ask the decode engine when the prefill engine's notice arrives, without
    waiting for its HTTP answer. Not measurably faster between engines on CPUs.
    """

    on_timeout: OnTimeout = "recompute"
    """What happens to a prompt whose notices don't come within deadlines.kv_ready. recompute: the
    decode engine computes what it lacks; fail: the request fails with 504.
    """


class RegistrationSettings(Section, frozen=True):
    """The ZMQ socket at which engines register (moriio, p2p-nccl)."""

    host: Annotated[Host, Option(_registration, "HOST", "--registration-host")] = "127.0.0.1"
    """Address to bind (--registration-host): every engine must reach it. Who else reaches it can
    register an engine before that engine does.
    """

    port: Annotated[
        Port | None,
        Option(
            "TCP port on which they register (default: that of vLLM's examples)",
            "PORT",
            "--registration-port",
        ),
    ] = None
    """TCP port (--registration-port): proxy_ping_port (moriio) or proxy_port (p2p-nccl) in the
    engines' configuration. null: that of vLLM's examples, 36367 and 30001.
    """

    timeout: Seconds = 5.0
    """Without a heartbeat for so many seconds, an engine takes part in no KV transfer. vLLM's
    engines send one every 3 seconds.
    """


def check_kv_events(
    own: KvEvents,
    nodes: Iterable[tuple[EngineKvEvents, int, KeyPath]],
    path: KeyPath,
    found: Mistakes,
) -> None:
    """Check the endpoints of a pool. `nodes`: each one's section, its number of ranks, and the key
    of the section.
    """
    of_nodes = list(nodes)
    most = max((ranks for _, ranks, _ in of_nodes), default=1)
    for section, ranks, here in [(own, most, path), *of_nodes]:
        for name in ("endpoint", "replay_endpoint"):
            text = getattr(section, name)
            if text is None:
                continue
            key = (*here, name)
            place, named, where = (
                address_of(text, ""),
                f"{spell_key(key)}: {quote(text)}",
                found.source(key),
            )
            if place is None:
                found.add(key, f"{named}: expected tcp://host:port, or tcp://*:port{where}")
            elif place[1] + ranks > 1 << 16:
                found.add(key, f"{named} leaves no port for each of {ranks} ranks{where}")
    if own.host is not None and own.port + most > 1 << 16:
        key = (*path, "port")
        found.add(
            key,
            f"{spell_key(key)} = {own.port} leaves no port for each of {most} "
            f"ranks{found.source(key)}",
        )
