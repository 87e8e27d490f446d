"""The settings as one typed tree, so that all packages get values that are already checked.

Owns names, units, bounds and defaults. `pdproxy.settings.load` fills the tree, `pdproxy.settings.crosscheck` checks fields
against each other, and `configs/reference.yaml` shows all of it to operators: a new field is added there as well.
"""

from __future__ import annotations

from operator import attrgetter
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
    Live,
    Option,
    Port,
    Seconds,
    Section,
    Text,
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
# Without keys, engines get clients' own headers: a mistake must not open the proxy, or the engines.
_WHILE_KEYS_ARE_WANTED = Live(while_same=attrgetter("auth.wants_keys", "auth.wants_admin_keys"))
_WHILE_SAME_PARTS = Live(while_same=attrgetter("placement", "asks_the_index"))
"""A pool's policy needs the same parts: its placement, and whether there is an index of prefixes."""


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
    """Keys of clients, and the proxy's keys for the engines."""

    api_keys: tuple[Key, ...] = ()
    """Keys of clients. If any is set, a client's `Authorization` is checked and not forwarded. If none is, it is forwarded to
    the engines, which then decide."""

    api_keys_file: Annotated[
        File | None,
        Option(
            "the keys that clients may send, one per line (default: no key is checked here)", "FILE", "--api-keys-file"
        ),
    ] = None
    """More keys of clients, one per line, alone or as `name:key` with limits such as `inflight=20 rpm=600 tpm=200000 weight=3
    priority=0..10`, and rights such as `models=llama-* until=2027-01-31T00:00:00Z`; blank lines and lines that begin with `#`
    are skipped. Read again when it changes."""

    engine_api_key: Key | None = None
    """Key for the engines, sent as a bearer token by probes, and for clients that sent one of `api_keys`. Without those, a
    client's own `Authorization` is forwarded instead. None: the engines need none."""

    engine_api_key_file: Annotated[
        File | None,
        Option("the one key that the engines were started with (default: none)", "FILE", "--engine-api-key-file"),
    ] = None
    """A file that holds the engines' key, in place of `engine_api_key`. Read again when it changes."""

    admin_keys: tuple[Key, ...] = ()
    """Keys for the admin API. Keys of clients are none of them."""

    admin_keys_file: Annotated[
        File | None,
        Option(
            "the keys for the admin API, one per line (default: a Unix socket and the loopback need none)",
            "FILE",
            "--admin-keys-file",
        ),
    ] = None
    """More of them, one per line, alone, as `name:key` or as `name:key read-only`. Read again when it changes."""

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
    """Tokens in a KV block. None: read from the engine's metrics."""

    tensor_parallel_size: Count | None = None
    """GPUs that share its weights. None: not known. Checked: the sizes of a pair must be what the connector allows, and a
    bootstrap server must name the workers of all."""

    data_parallel_size: Count = 1
    """How many data-parallel ranks answer at its URL. With several, connectors whose legs name the other engine choose the rank
    of each leg, by the header `X-data-parallel-rank`."""

    max_num_seqs: Count | None = None
    """Requests that a decode engine runs at once. Where it waits for pushed KV it must not queue: beyond this number it gets no
    more such prompts. They wait for no place: if no other pair is free, one engine serves them alone. None: no bound."""

    kv_lease_duration: Seconds | None = None
    """Seconds for which a prefill engine keeps KV that no decode engine reads, as in its `kv_connector_extra_config`. No decode
    engine is asked with KV older than nine tenths of that. None: as vLLM's own default."""

    engine_id: Text | None = None
    """The `engine_id` of its `--kv-transfer-config`. None: it chooses one at each start."""

    remote_host: Host | None = None
    """The host at which decode engines reach a prefill engine's side channel; with turns, prefill engines a decode engine's. It
    overrides the one in its KV handles, and the pool's `remote_host`. None: as the pool says."""
    registered_as: Text | None = None
    """`host:port` that it registers as its HTTP address (connectors whose engines register). None: those of its URL."""

    profile: File | None = None
    """How long its work takes, in place of the pool's `profile`."""

    max_num_batched_tokens: Count | None = None
    """The most tokens of its steps, as it was started. None: as its profile says, or else 8192."""

    bootstrap: Text | None = None
    """A prefill engine's Mooncake bootstrap server, `http://host:port`, also for decode engines. None: at its own host and the
    pool's `bootstrap_port`."""

    kv_events: NodeKvEvents = NodeKvEvents()
    """Where it publishes KV events."""


class EngineTls(Section, frozen=True):
    """TLS towards engines with an `https://` URL. Files are PEM, and are read again when they change."""

    ca: File | None = None
    """Authorities that must have signed engines' certificates. None: those of the system."""

    certificate: File | None = None
    """The proxy's certificate, for engines that require one. None: it has none."""

    key: File | None = None
    """Its private key. None: the certificate's file holds it, too."""

    verify: bool | None = None
    """False: any certificate of any host is trusted, and anybody in between can read prompts and keys. None: true."""


class Receiver(Section, frozen=True):
    """Where a decode engine's ranks receive KV. LMCache's `pd_peer_init_port` and `pd_peer_alloc_port`, one port per rank."""

    host: Annotated[Host | None, Option(_receivers, "HOST", "--receiver-host", "--nixl-peer-host")] = None
    """LMCache's `pd_peer_host`. None: the host of the engine's URL."""

    init_ports: Annotated[
        tuple[Port, ...],
        Option(
            "LMCache's pd_peer_init_port: one TCP port per tensor-parallel rank, such as 7300,7301 (default: none)",
            "PORTS",
            "--receiver-init-port",
            "--nixl-peer-init-port",
        ),
    ] = ()
    """Ports at which a transfer is set up, in the order of ranks."""

    alloc_ports: Annotated[
        tuple[Port, ...],
        Option(
            "LMCache's pd_peer_alloc_port: one TCP port per tensor-parallel rank, such as 7400,7401 (default: none)",
            "PORTS",
            "--receiver-alloc-port",
            "--nixl-peer-alloc-port",
        ),
    ] = ()
    """Ports at which space for a transfer is requested, in the order of ranks."""


class Node(Section, frozen=True):
    """One engine: a vLLM server with its own HTTP port."""

    url: str
    """Where it listens, `http://host:port` or `https://host:port`. Also its name in logs and metrics."""

    role: Role
    """What it does for a request: make the KV, use it, or both. `any`: each of these, for different requests at the same time."""

    serves_whole: bool = False
    """Whether a prefill engine may also serve requests whole."""

    sources: tuple[Text, ...] = ()
    """URLs of the prefill engines whose KV a decode engine takes. None given: of all in the pool."""

    labels: dict[str, str] = {}  # noqa: RUF012 - a struct copies its defaults
    """Free text by name: where it is, for instance. The pool's `pair_within` names those that matter for pairs."""

    facts: Facts = Facts()
    """What is known of it before it has been asked."""

    receiver: Receiver = Receiver()
    """Where it receives KV, for connectors that need to know (lmcache-pd)."""

    api_key: Key | None = None
    """This engine's key, in place of `auth.engine_api_key`."""

    api_key_file: File | None = None
    """A file that holds it. Read again when it changes."""

    tls: EngineTls = EngineTls()
    """TLS towards this engine. What is set here overrides the pool's settings."""

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


class Pool(Section, frozen=True):
    """Engines that can work together, and how."""

    name: Text = "default"
    """The pool's name in logs, metrics and `/ready`. Each pool has one of its own."""

    models: AtOnce[tuple[Text, ...]] = ()
    """Models whose requests this pool gets although no engine of it lists them, if no other pool's does: names, or patterns with
    `*`. The longest pattern that fits a name counts."""

    aliases: AtOnce[dict[str, Text]] = {}  # noqa: RUF012 - a struct copies its defaults
    """Other names of models, each with the name that the engines know."""

    weight: AtOnce[Weight] = 1.0
    """Where several pools serve a model, this pool's part of the requests. 0: only what no other pool serves."""

    connector: Annotated[Connector, Option(_connectors, "NAME", "--connector")] = "nixl"
    """How KV gets from prefill to decode engines: depends on the `kv_connector` that they were started with. `auto`: the engines
    are asked at the start; if they do not show it, the proxy does not start."""

    dispatch: Dispatch | None = None
    """The order of a prompt's two legs: the prefill leg first, or both at once. None: the connector's usual order, and sequential
    with engines of role any."""

    alone: AtOnce[AloneLimit] = "always"
    """Which prompts a decode engine may serve whole where they are not split: all, none, or those of up to so many tokens."""

    remote_host: RemoteHost = "engine"
    """Which host decode engines connect to for KV: the one that the prefill `engine` names in its KV handles, or the one of its
    `url`, for engines that do not know how others reach them (address translation)."""

    lmcache: LMCache = LMCache()
    """For the connector lmcache-pd."""

    cpu: Cpu = Cpu()
    """For the connector cpu."""

    kv_ready_port: Port | None = None
    """Port to which this pool's engines send notices. None: `kv_ready.port`. Two pools can't share one."""

    registration_port: Port | None = None
    """Port at which this pool's engines register. None: `registration.port`. Two pools can't share one."""

    bootstrap_port: Port = VLLM_BOOTSTRAP_PORT
    """Port of a prefill engine's Mooncake bootstrap server, if nothing else names it. vLLM's own default; vllm-omni's files
    assume 25201."""

    tokenize: Annotated[
        Tokenize,
        Option(
            "when the proxy makes the token ids of prompts: off; auto: where the connector needs them; always: also to save "
            "engines this work",
            "WHEN",
            "--tokenize",
        ),
    ] = "auto"
    """Whether the proxy makes prompts' token ids: never, only if the connector needs them, or whenever that saves an engine
    the same work."""

    tokenizer: Annotated[
        File | None,
        Option(
            "folder of a model with its tokenizer (default: the model that the engines report, if it is on this machine)",
            "FOLDER",
            "--tokenizer",
        ),
    ] = None
    """A model's folder with its tokenizer and chat template. None: the one that the engines report as theirs, if it is on this
    machine."""

    turns: Turns = Turns()
    """Whether KV of a finished turn is used for the conversation's next prompt."""

    kv_events: KvEvents = KvEvents()
    """Whether engines' reports of what they have cached are read."""

    prefixes: Prefixes = Prefixes()
    """What is kept of engines' prefix caches."""

    policy: Annotated[Annotated[PoolPolicy, _WHILE_SAME_PARTS], Option(_policies, "NAME", "--policy")] = PoolPolicy()
    """How engines are chosen."""

    slo: Annotated[PoolSlo, _WHILE_SAME_PARTS] = PoolSlo()
    """What is wanted of requests' times."""

    profile: File | None = None
    """How long an engine's work takes: the name of a profile that pdproxy ships, or the file of one (`pdproxy calibrate`). None:
    not known. For placements that predict times."""

    pair_within: tuple[Text, ...] = ()
    """Labels of engines: two engines share work only if they have the same values of all of these."""

    tls: EngineTls = EngineTls()
    """TLS towards the engines."""

    nodes: AtOnce[tuple[Node, ...]] = ()
    """The engines. Those named by flags are added after these. One with a URL of DNS stands for all that the name has."""

    dns_nodes: AtOnce[tuple[Node, ...]] = ()
    """Nodes whose URLs are `dns://NAME:PORT` or `srv://NAME`. Those of `nodes` are moved here when the settings are read."""

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
    """Where clients reach the proxy."""

    auth: Annotated[Auth, _WHILE_KEYS_ARE_WANTED] = Auth()
    """Keys of clients and of engines."""

    pools: tuple[Pool, ...] = ()
    """The engines, in pools: those of one pool work together. After `load` there is at least one."""

    media: MediaSettings = MediaSettings()
    """Which URLs of media in requests engines may fetch."""

    engines: EngineSettings = EngineSettings()
    """In which networks engines may be."""

    deadlines: Deadlines = Deadlines()
    """How long each wait may last."""

    limits: Limits = Limits()
    """How much is accepted at once."""

    overload: Overload = Overload()
    """Who is served first while requests wait."""
    tenants: TenantSettings = TenantSettings()
    """Whether tenants share engines' caches."""
    health: Health = Health()
    """Engines that stand still, and engines that come back."""

    outliers: OutlierSettings = OutlierSettings()
    """Engines that fail more often, or are slower, than their peers."""
    continuations: Continuations = Continuations()
    """Whether other engines go on with streams whose engines fail."""

    kv_ready: KvReady = KvReady()
    """Where engines send notices that KV is ready."""

    registration: Registration = Registration()
    """Where engines register."""

    probes: Probes = Probes()
    """How often engines are probed."""
    dns: Dns = Dns()
    """How engines are found that DNS names."""

    replicas: ReplicaSettings = ReplicaSettings()
    """Other proxies in front of the same engines."""

    observe: Observe = Observe()
    """Logs."""

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
