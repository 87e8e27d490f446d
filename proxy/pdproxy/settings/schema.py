"""The settings as one typed tree, so that all packages get values that are already checked.

Owns names, units, bounds and defaults. The docstring below a field says what it means: `configs/reference.yaml` and the page of
the settings are made of these. `pdproxy.settings.load` fills the tree, `pdproxy.settings.crosscheck` checks fields against each
other.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdproxy.scheduling import placements, policies
from pdproxy.scheduling.placements import AUTO, SPLIT
from pdproxy.settings.connector_options import Cpu, LMCache
from pdproxy.settings.continuations import Continuations
from pdproxy.settings.dns import Dns
from pdproxy.settings.engine_networks import EngineSettings
from pdproxy.settings.health import Health
from pdproxy.settings.kv_events import KvEvents, NodeKvEvents
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.settings.listen import Listen
from pdproxy.settings.media import MediaSettings
from pdproxy.settings.outliers import OutlierSettings
from pdproxy.settings.overload import Overload
from pdproxy.settings.policy import PoolPolicy, PoolSlo
from pdproxy.settings.prefixes import Prefixes
from pdproxy.settings.probes import Observe, Probes
from pdproxy.settings.replicas import ReplicaSettings
from pdproxy.settings.section import (
    AtOnce,
    Count,
    File,
    Host,
    Key,
    Option,
    Port,
    Seconds,
    Section,
    Text,
    WhileSame,
    names_of,
)
from pdproxy.settings.sockets import KvReady, Registration
from pdproxy.settings.tenants import TenantSettings
from pdproxy.settings.turns import Turns
from pdproxy.transfer import registry

Role = Literal["prefill", "decode", "aggregated", "any"]
Connector = Annotated[str, names_of(registry.choices)]
Dispatch = Literal["sequential", "concurrent"]
RemoteHost = Literal["engine", "url"]
AloneLimit = Literal["always", "never"] | Count
VLLM_BOOTSTRAP_PORT = 8998
"""vLLM's default for VLLM_MOONCAKE_BOOTSTRAP_PORT. vllm-omni assumes 25201 if its stages name none."""
Tokenize = Literal["off", "auto", "always"]
Weight = Annotated[float, Meta(ge=0, le=1_000_000)]


def _connectors() -> str:
    return f"how KV is transferred, as the engines are configured: {', '.join(registry.names())}; auto: ask the engines"


def _policies() -> str:
    return (
        f"who serves a request: a placement ({', '.join(placements.names())}), or a policy for all legs "
        f"({', '.join(policies.names())}) "
        f"(default: {placements.AUTO} where it has something to decide by, else {PoolPolicy().prefill})"
    )


def _receivers() -> str:
    names = ", ".join(entry.name for entry in registry.ENTRIES if entry.capabilities.needs_receiver)
    return f"only {names}: address where a decode engine receives KV, LMCache's pd_peer_host (default: its URL's host)"


class Auth(Section, frozen=True):
    """Keys of clients, and the proxy's key for the engines.

    `pdproxy config print` masks keys; logs never contain them. Every route under /v1 requires a key, before the body is read.
    /health and /ready need none; for /metrics, /version and others see listen.operator_routes.
    """

    api_keys: AtOnce[tuple[Key, ...]] = ()
    """Keys of clients. If any is set, a client's `Authorization: Bearer ...` is checked and not forwarded. If none is set, the
    header is forwarded, and the engines decide. Prefer the variable PDPROXY_AUTH__API_KEYS, comma separated, to this file."""

    api_keys_file: Annotated[
        AtOnce[File | None],
        Option(
            "the keys that clients may send, one per line (default: no key is checked here)", "FILE", "--api-keys-file"
        ),
    ] = None
    """A file with more keys, one per line (--api-keys-file): a key alone, or name:key with limits for all keys of that name:
    requests at once, requests and tokens per minute, a weight, priorities (inflight=20 rpm=600 tpm=200000 weight=3
    priority=0..10), and with what this key is good for (models=llama-*,qwen pools=default routes=chat,completions tenants=a
    max_tokens=4096 n=4 until=2027-01-31T00:00:00Z). Blank lines and lines that begin with # are skipped. It is checked once per
    second, and added or removed keys take effect then. A file that is missing, empty or invalid is an error at the start. Later,
    the old keys stay in force if the file is missing or invalid; if it holds no key, no key of it is valid. The log and /ready
    report both. null: none."""

    engine_api_key: AtOnce[Key | None] = None
    """Key for the engines (their --api-key). Probes send it as a bearer token; so do requests of clients that sent one of
    api_keys. Without api_keys a client's own Authorization is forwarded instead. null: the engines need no key."""

    engine_api_key_file: Annotated[
        AtOnce[File | None],
        Option("the one key that the engines were started with (default: none)", "FILE", "--engine-api-key-file"),
    ] = None
    """The same, from a file that holds one key (--engine-api-key-file), read again when it changes. null: none."""

    admin_keys: AtOnce[tuple[Key, ...]] = ()
    """Keys for the admin API (listen.admin), sent as `Authorization: Bearer ...`. Keys of clients do not open it. Who has one can
    send prompts and the engines' key to any address, by adding an engine there. Without any, a Unix socket and the loopback need
    none."""

    admin_keys_file: Annotated[
        AtOnce[File | None],
        Option(
            "the keys for the admin API, one per line (default: a Unix socket and the loopback need none)",
            "FILE",
            "--admin-keys-file",
        ),
    ] = None
    """A file with more of them, one per line (--admin-keys-file): a key alone, or name:key; the log shows the name. `name:key
    read-only` changes nothing. It is checked once per second. A key that is a client's, too, is an error at the start, and does
    not open the admin API later; so is a key of engines. null: none."""

    @property
    def wants_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def wants_admin_keys(self) -> bool:
        """Whether operators need a key."""
        return bool(self.admin_keys) or self.admin_keys_file is not None

    def __repr__(self) -> str:
        # Settings appear in logs and tracebacks; keys must not.
        key = "set" if self.engine_api_key or self.engine_api_key_file else "not set"
        return f"Auth(<{len(self.api_keys)} api_keys>, <engine_api_key {key}>)"


class Facts(Section, frozen=True):
    """What is known of an engine before it has been asked."""

    block_size: Count | None = None
    """Tokens per KV block. null: read from the engine."""

    tensor_parallel_size: Count | None = None
    """Number of GPUs that share its weights: the sizes of a pair must be what the connector allows, and a bootstrap server
    (mooncake) must name so many workers of each data-parallel rank. null: not known."""

    data_parallel_size: Count = 1
    """How many data-parallel ranks answer at its URL (--data-parallel-size). With several, connectors whose legs name the other
    engine choose the rank of each leg (X-data-parallel-rank); for all others the engine chooses."""

    max_num_seqs: Count | None = None
    """Requests that a decode engine runs at once (--max-num-seqs). Where it waits for pushed KV (nixl-push, mooncake) it should
    not queue: with this many requests it gets no more such prompts. These wait for no place: if no other pair is free, one engine
    serves them alone. null: no bound."""

    kv_lease_duration: Seconds | None = None
    """Seconds for which a prefill engine keeps KV that no decode engine reads, as in its kv_connector_extra_config. No decode
    engine is asked with KV older than nine tenths of that: the prompt is prefilled again. null: as vLLM's own default, 30 s
    (nixl, nixl-push) or 480 s (mooncake)."""

    engine_id: Text | None = None
    """The engine_id of its --kv-transfer-config. null: the engine makes a new one at each start."""

    remote_host: Host | None = None
    """The host at which decode engines reach a prefill engine's side channel, in place of the one that it names in its KV handles
    (nixl, nixl-push). With turns.bidirectional also the host at which prefill engines reach a decode engine's. null: as
    remote_host of the pool says."""
    registered_as: Text | None = None
    """host:port that it registers as its HTTP address (moriio, p2p-nccl). null: the host and port of its URL. vLLM registers the
    machine's IP address and the http_port of its --kv-transfer-config."""

    profile: File | None = None
    """How long its work takes, in place of the pool's profile."""

    max_num_batched_tokens: Count | None = None
    """The most tokens of its steps, as it was started. null: as its profile says, or else 8192. For placements that predict
    times."""

    bootstrap: Text | None = None
    """A prefill engine's Mooncake bootstrap server, http://host:port, as the decode engines reach it, too. null: its own host, at
    the pool's bootstrap_port."""

    kv_events: NodeKvEvents = NodeKvEvents()
    """Where it publishes KV events. Each value overrides that of the pool's kv_events."""


class EngineTls(Section, frozen=True):
    """TLS towards engines with an `https://` URL. Files are PEM, and are read again when they change."""

    ca: File | None = None
    """Authorities that must have signed the engines' certificates. null: those of the system."""

    certificate: File | None = None
    """The proxy's own certificate, for engines that require one. null: none."""

    key: File | None = None
    """Its private key, not encrypted. null: the certificate's file also holds the key."""

    verify: bool | None = None
    """false trusts any certificate of any host: somebody in between can read prompts and keys. null: true."""


class Receiver(Section, frozen=True):
    """Where a decode engine's ranks receive KV. LMCache's `pd_peer_init_port` and `pd_peer_alloc_port`, one port per rank."""

    host: Annotated[Host | None, Option(_receivers, "HOST", "--receiver-host", "--nixl-peer-host")] = None
    """LMCache's pd_peer_host (--receiver-host). null: the host of the engine's URL."""

    init_ports: Annotated[
        tuple[Port, ...],
        Option(
            "LMCache's pd_peer_init_port: one TCP port per tensor-parallel rank, such as 7300,7301 (default: none)",
            "PORTS",
            "--receiver-init-port",
            "--nixl-peer-init-port",
        ),
    ] = ()
    """LMCache's pd_peer_init_port (--receiver-init-port)."""

    alloc_ports: Annotated[
        tuple[Port, ...],
        Option(
            "LMCache's pd_peer_alloc_port: one TCP port per tensor-parallel rank, such as 7400,7401 (default: none)",
            "PORTS",
            "--receiver-alloc-port",
            "--nixl-peer-alloc-port",
        ),
    ] = ()
    """LMCache's pd_peer_alloc_port (--receiver-alloc-port)."""


class Node(Section, frozen=True):
    """One engine: a vLLM server with its own HTTP port."""

    url: str
    """http://host:port or https://host:port without a path; each engine once. Also the engine's name in logs and metrics.
    dns://NAME:PORT is an engine at each address of a name, srv://NAME one at each target of its service records; dnss:// and
    srvs://: with TLS. They are followed while the proxy runs (section dns)."""

    role: Role
    """prefill computes prompts, decode generates from them, aggregated does both. any (kv_role kv_both; not with every
    connector): each of these, for different requests at the same time."""

    serves_whole: bool = False
    """Whether a prefill engine may also serve requests whole."""

    sources: tuple[Text, ...] = ()
    """For a decode engine: URLs of the prefill engines whose KV it takes. []: all in the pool."""

    labels: dict[str, str] = {}  # noqa: RUF012 - a struct copies its defaults
    """Names with free text, such as {rack: r1}. pair_within names those that matter to pdproxy."""

    facts: Facts = Facts()
    """Known facts about the engine."""

    receiver: Receiver = Receiver()
    """Where it receives KV: only for decode engines of lmcache-pd. One port per tensor-parallel rank, in order."""

    api_key: Key | None = None
    """This engine's key. null: auth.engine_api_key."""

    api_key_file: File | None = None
    """The same from a file, read again when it changes."""

    tls: EngineTls = EngineTls()
    """Each value overrides that of the pool's tls; certificate and key go together. Only for https:// URLs."""

    @property
    def prefills(self) -> bool:
        """Whether it makes KV for other engines."""
        return self.role in ("prefill", "any")

    @property
    def decodes(self) -> bool:
        """Whether it uses other engines' KV."""
        return self.role in ("decode", "any")

    def __repr__(self) -> str:
        key = "set" if self.api_key or self.api_key_file else "not set"
        return f"Node({self.url}, {self.role}, <api_key {key}>)"


_WHILE_SAME_PARTS = WhileSame("placement", "asks_the_index")
"""A pool has its parts from the start: what decides whether prompts are split, and perhaps an index of prefixes."""


class Pool(Section, frozen=True):
    """Engines that can work together, and how."""

    name: Text = "default"
    """The pool's name in logs, metrics and /ready. Each pool has one of its own."""

    models: AtOnce[tuple[Text, ...]] = ()
    """Models whose requests this pool gets although no engine of it lists them, if no other pool's does: names, or patterns such
    as "llama-*" or "*". The longest pattern that fits a name counts."""

    aliases: AtOnce[dict[str, Text]] = {}  # noqa: RUF012 - a struct copies its defaults
    """Other names of models, each with the name that the engines know, such as {fast: llama-8b}."""

    weight: AtOnce[Weight] = 1.0
    """Where several pools serve a model, this pool's part of the requests. 0: only what no other pool serves."""

    connector: Annotated[Connector, Option(_connectors, "NAME", "--connector")] = "nixl"
    """How KV gets from prefill to decode engines: the kv_connector that they were started with (docs/guide/connectors.md).
      nixl        NixlConnector: the decode engine pulls
      nixl-push   NixlPushConnector: both legs at once, the prefill engine pushes
      mooncake    MooncakeConnector: both legs at once, by an id of the proxy's; needs the prefill engines' bootstrap servers
      lmcache-pd  LMCache with enable_pd: the prefill engine pushes, and sends a notice over ZMQ when it has finished
      lmcache-mp  LMCache as a separate process: it posts to /api/v1/telemetry at kv_ready's port when KV is stored
      shared      storage that both engines reach: ExampleConnector, Mooncake's store, LMCache's shared storage
      moriio      MoRIIOConnector: the decode engine reads, or the prefill engine writes; engines register with the proxy
      p2p-nccl    P2pNcclConnector (vLLM up to 0.23): the prefill engine sends; engines register with the proxy
      kvstore-keys  a store under keys that the proxy makes (vLLM's pull request 12957; historic)
      cpu         vLLM's CPUConnector (pull request 18332; historic): the prefill engine pushes to the decode engine's host memory
      auto        the engines are asked at the start; if they do not show it, the proxy does not start
    """

    dispatch: Dispatch | None = None
    """The order of a prompt's two legs: sequential (the prefill leg first) or concurrent (both at once: the decode engine waits
    for the KV while the prompt is prefilled). null: the connector's usual order, and sequential with engines of role any: at
    once, two of them can wait for each other's KV for ever. Most connectors can do one of them only."""

    alone: AtOnce[AloneLimit] = "always"
    """Which prompts a decode engine may serve whole where they are not split (docs/guide/policies.md): always; never; or up to so
    many tokens, such as 4000: it computes a prompt between the tokens of its streams, which wait. Tokens that are not known are
    taken to be a fourth of the text's bytes. Others get 503 with Retry-After, unless an engine of another role serves whole."""

    remote_host: RemoteHost = "engine"
    """Which host decode engines connect to for KV (nixl, nixl-push): the one that the prefill engine names in its KV handles
    (engine), or the one of its URL (url), for engines that do not know how others reach them (address translation). With
    turns.bidirectional also which host prefill engines connect to."""

    lmcache: LMCache = LMCache()

    cpu: Cpu = Cpu()

    kv_ready_port: Port | None = None
    """Port to which this pool's engines send notices. null: kv_ready.port. Two pools can't share one."""

    registration_port: Port | None = None
    """Port at which this pool's engines register. null: registration.port. Two pools can't share one."""

    bootstrap_port: Port = VLLM_BOOTSTRAP_PORT
    """Port of a prefill engine's Mooncake bootstrap server, if its facts and its stage (--stage-config) name none. The default is
    vLLM's own, VLLM_MOONCAKE_BOOTSTRAP_PORT; vllm-omni's stages assume 25201, and mostly name it."""

    tokenize: Annotated[
        Tokenize,
        Option(
            "when the proxy makes the token ids of prompts: off; auto: where the connector needs them; always: also to save "
            "engines this work",
            "WHEN",
            "--tokenize",
        ),
    ] = "auto"
    """Whether the proxy turns prompts into token ids (--tokenize): off, auto (only if the connector needs ids), or always, which
    saves the prefill engine the same work (not with shared and lmcache-mp, whose engines take no ids). The ids are compared with
    each engine's when it starts; a difference switches this off, and the log, /ready and pdproxy_tokenize_agrees report it."""

    tokenizer: Annotated[
        File | None,
        Option(
            "folder of a model with its tokenizer (default: the model that the engines report, if it is on this machine)",
            "FOLDER",
            "--tokenizer",
        ),
    ] = None
    """A model's folder with its tokenizer and chat template (--tokenizer). null: the model that the engines report, if this
    machine has it; otherwise an engine is asked for the ids that the connector needs."""

    turns: Turns = Turns()

    kv_events: KvEvents = KvEvents()
    """Engines' reports of the blocks of KV that they have cached (their --kv-events-config), over ZMQ
    (docs/guide/connectors.md)."""

    prefixes: Prefixes = Prefixes()

    policy: Annotated[Annotated[PoolPolicy, _WHILE_SAME_PARTS], Option(_policies, "NAME", "--policy")] = PoolPolicy()

    slo: Annotated[PoolSlo, _WHILE_SAME_PARTS] = PoolSlo()

    profile: File | None = None
    """How long an engine's work takes: the name of a profile that pdproxy ships (h200-8b), or the file of one, which `pdproxy
    calibrate` makes. null: not known. For placements that predict times."""

    pair_within: tuple[Text, ...] = ()
    """Labels of engines (nodes[].labels): two engines share work only if they have the same values of all of these, such as
    [rack]."""

    tls: EngineTls = EngineTls()
    """TLS to engines with an https:// URL. Files are read again when they change, like those of listen.tls. An engine whose
    certificate is not trusted counts as down; /ready and the log give the reason."""

    nodes: AtOnce[tuple[Node, ...]] = ()
    """The engines; --prefill, --decode, --aggregated and --any add to these. Prefill engines need a decode engine."""

    dns_nodes: AtOnce[tuple[Node, ...]] = ()
    """Nodes that DNS names. Give them in `nodes`: those with such URLs are kept here once the settings are read."""

    @property
    def all_nodes(self) -> tuple[Node, ...]:
        """The nodes of both kinds."""
        return (*self.nodes, *self.dns_nodes)

    @property
    def alone_up_to(self) -> int | None:
        """How many tokens a prompt may have that a decode engine serves whole; None: any number."""
        return {"always": None, "never": 0}[self.alone] if isinstance(self.alone, str) else self.alone

    @property
    def placement(self) -> str:
        """What decides whether a prompt is split: `policy.placement`, by default `auto` where it has something to decide by.

        That is an engine of role any, an objective or a profile. With a policy for a leg it is `split`.
        """
        policy, usual = self.policy, PoolPolicy()
        if policy.placement is not None:
            return policy.placement
        if (policy.prefill, policy.decode) != (usual.prefill, usual.decode):
            return SPLIT
        decides = self.slo != PoolSlo() or self.profile is not None or any(one.role == "any" for one in self.all_nodes)
        return AUTO if decides else SPLIT

    @property
    def asks_the_index(self) -> bool:
        """Whether engines are chosen by what they have cached."""
        asked = {self.policy.prefill, self.policy.decode} & policies.ASK_THE_INDEX
        return bool(asked) or self.placement in placements.ASK_THE_INDEX


class Settings(Section, frozen=True):
    """All settings."""

    listen: Listen = Listen()

    # Without keys, engines get clients' own headers: a mistake must not open the proxy, or the engines.
    auth: Annotated[Auth, WhileSame("auth.wants_keys", "auth.wants_admin_keys")] = Auth()

    pools: tuple[Pool, ...] = ()
    """The engines, in pools: those of one pool work together. Each model goes to the pools that serve it."""

    media: MediaSettings = MediaSettings()

    engines: EngineSettings = EngineSettings()

    deadlines: Deadlines = Deadlines()

    limits: Limits = Limits()

    overload: Overload = Overload()
    tenants: TenantSettings = TenantSettings()
    health: Health = Health()

    outliers: OutlierSettings = OutlierSettings()
    continuations: Continuations = Continuations()

    kv_ready: KvReady = KvReady()

    registration: Registration = Registration()

    probes: Probes = Probes()
    dns: Dns = Dns()

    replicas: ReplicaSettings = ReplicaSettings()

    observe: Observe = Observe()

    @property
    def hides_operator_routes(self) -> bool:
        """Whether only operators see at the clients' port what is for them."""
        if self.listen.operator_routes == "auto":
            return self.auth.wants_keys or self.overload.tenant_header is not None
        return self.listen.operator_routes == "admin"

    @property
    def pool(self) -> Pool:
        """The first pool."""
        return self.pools[0]

    def of_pool(self, pool: Pool) -> Settings:
        """Return the settings for the parts of one pool, which is the only one in them."""
        if self.pools == (pool,) and pool.kv_ready_port is None and pool.registration_port is None:
            return self
        replace, kv_ready, registration = msgspec.structs.replace, self.kv_ready, self.registration
        if pool.kv_ready_port is not None:
            kv_ready = replace(kv_ready, port=pool.kv_ready_port)
        if pool.registration_port is not None:
            registration = replace(registration, port=pool.registration_port)
        return replace(self, pools=(pool,), kv_ready=kv_ready, registration=registration)
