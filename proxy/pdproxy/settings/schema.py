"""The settings as one typed tree, so that all packages get values that are already checked.

Owns names, units, bounds and defaults. `pdproxy.settings.load` fills the tree, `pdproxy.settings.crosscheck` checks fields
against each other, and `configs/reference.yaml` shows all of it to operators: a new field is added there as well.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdproxy.scheduling.placements import AUTO, SPLIT
from pdproxy.settings.connector_options import Cpu, LMCache
from pdproxy.settings.continuations import Continuations
from pdproxy.settings.health import Health
from pdproxy.settings.kv_events import KvEvents, NodeKvEvents
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.settings.outliers import OutlierSettings
from pdproxy.settings.overload import Overload
from pdproxy.settings.policy import PoolPolicy, PoolSlo
from pdproxy.settings.prefixes import Prefixes
from pdproxy.settings.probes import Observe, Probes
from pdproxy.settings.section import Count, File, Host, Key, Port, Seconds, Section, Text, names_of
from pdproxy.settings.turns import Turns
from pdproxy.transfer import registry

Role = Literal["prefill", "decode", "aggregated", "any"]
Connector = Annotated[str, names_of(registry.choices)]
Dispatch = Literal["sequential", "concurrent"]
RemoteHost = Literal["engine", "url"]
OnTimeout = Literal["recompute", "fail"]
VLLM_BOOTSTRAP_PORT = 8998
"""vLLM's default for VLLM_MOONCAKE_BOOTSTRAP_PORT. vllm-omni assumes 25201 if its stages name none."""
Tokenize = Literal["off", "auto", "always"]
Workers = Annotated[int, Meta(ge=1, le=64)]


class ListenTls(Section, frozen=True):
    """TLS for clients. Files are PEM, and are read again when they change."""

    certificate: File | None = None
    """The server's certificate with its chain. None: plain HTTP."""

    key: File | None = None
    """Its private key. None: it is in the certificate's file, too."""

    key_password_file: File | None = None
    """The key's password, on the first line of a file. None: the key is not encrypted."""

    client_ca: File | None = None
    """Authorities of client certificates. If set, a client without such a certificate gets no connection."""


class Cors(Section, frozen=True):
    """What browsers on pages of other sites may do. Names and defaults of vLLM's flags."""

    allowed_origins: tuple[Text, ...] = ()
    """Origins whose pages may read answers; `*` means all. None by default."""

    allow_credentials: bool = False
    """Whether such pages may send cookies and the like."""

    allowed_methods: tuple[Text, ...] = ("*",)
    """Methods that they may use; `*` means all."""

    allowed_headers: tuple[Text, ...] = ("*",)
    """Headers that they may send; `*` means all."""


class Listen(Section, frozen=True):
    """Where clients reach the proxy."""

    host: Host = "127.0.0.1"
    """Address to bind. The loopback by default, so that a proxy is open to a network only if the operator wants it."""

    port: Port = 8000
    """TCP port. The default of `vllm serve`, so that clients need no change."""

    workers: Workers = 1
    """Processes that serve clients: each uses one core at most. With several, a further process supervises them."""

    trusted_proxies: tuple[Text, ...] = ()
    """Addresses or networks of proxies in front of this one. For a request from there, the client's address is the last one in
    `X-Forwarded-For` that is not a proxy's. Other senders' headers are not read: a client could name any address."""

    tls: ListenTls = ListenTls()
    """TLS for clients."""
    cors: Cors = Cors()
    """What browsers on pages of other sites may do."""


class Auth(Section, frozen=True):
    """Keys of clients, and the proxy's keys for the engines."""

    api_keys: tuple[Key, ...] = ()
    """Keys of clients. If any is set, a client's `Authorization` is checked and not forwarded. If none is, it is forwarded to
    the engines, which then decide."""

    api_keys_file: File | None = None
    """More keys of clients, one per line, alone or as `name:key` with limits such as `inflight=20 rpm=600 tpm=200000 weight=3
    priority=0..10`; blank lines and lines that begin with `#` are skipped. Read again when it changes."""

    engine_api_key: Key | None = None
    """Key for the engines, sent as a bearer token by probes, and for clients that sent one of `api_keys`. Without those, a
    client's own `Authorization` is forwarded instead. None: the engines need none."""

    engine_api_key_file: File | None = None
    """A file that holds the engines' key, in place of `engine_api_key`. Read again when it changes."""

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

    host: Host | None = None
    """LMCache's `pd_peer_host`. None: the host of the engine's URL."""

    init_ports: tuple[Port, ...] = ()
    """Ports at which a transfer is set up, in the order of ranks."""

    alloc_ports: tuple[Port, ...] = ()
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
    """The pool's name in logs."""

    connector: Connector = "nixl"
    """How KV gets from prefill to decode engines: depends on the `kv_connector` that they were started with. `auto`: the engines
    are asked at the start; if they do not show it, the proxy does not start."""

    dispatch: Dispatch | None = None
    """The order of a prompt's two legs: the prefill leg first, or both at once. None: the connector's usual order, and sequential
    with engines of role any."""

    remote_host: RemoteHost = "engine"
    """Which host decode engines connect to for KV: the one that the prefill `engine` names in its KV handles, or the one of its
    `url`, for engines that do not know how others reach them (address translation)."""

    lmcache: LMCache = LMCache()
    """For the connector lmcache-pd."""

    cpu: Cpu = Cpu()
    """For the connector cpu."""

    bootstrap_port: Port = VLLM_BOOTSTRAP_PORT
    """Port of a prefill engine's Mooncake bootstrap server, if nothing else names it. vLLM's own default; vllm-omni's files
    assume 25201."""

    tokenize: Tokenize = "auto"
    """Whether the proxy makes prompts' token ids: never, only if the connector needs them, or whenever that saves an engine
    the same work."""

    tokenizer: File | None = None
    """A model's folder with its tokenizer and chat template. None: the one that the engines report as theirs, if it is on this
    machine."""

    turns: Turns = Turns()
    """Whether KV of a finished turn is used for the conversation's next prompt."""

    kv_events: KvEvents = KvEvents()
    """Whether engines' reports of what they have cached are read."""

    prefixes: Prefixes = Prefixes()
    """What is kept of engines' prefix caches."""

    policy: PoolPolicy = PoolPolicy()
    """How engines are chosen."""

    slo: PoolSlo = PoolSlo()
    """What is wanted of requests' times."""

    profile: File | None = None
    """How long an engine's work takes: the name of a profile that pdproxy ships, or the file of one (`pdproxy calibrate`). None:
    not known. For placements that predict times."""

    pair_within: tuple[Text, ...] = ()
    """Labels of engines: two engines share work only if they have the same values of all of these."""

    tls: EngineTls = EngineTls()
    """TLS towards the engines."""

    nodes: tuple[Node, ...] = ()
    """The engines. Those named by flags are added after these."""

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
        decides = self.slo != PoolSlo() or self.profile is not None or any(one.role == "any" for one in self.nodes)
        return AUTO if decides else SPLIT


class KvReady(Section, frozen=True):
    """The ZMQ socket to which engines send notices that KV is ready. It is bound if the connector has such notices."""

    host: Host = "127.0.0.1"
    """Address to bind: one that every prefill rank can reach. Anybody who can reach it can send notices."""

    port: Port = 7500
    """TCP port: LMCache's `pd_proxy_port`. Its own example proxy takes 8500."""

    notifier: bool = False
    """Whether engines of connector nixl carry pdproxy's notifier (`pdproxy notifier`). If so, the socket is bound for them."""

    early: bool = False
    """With the notifier: ask the decode engine at the prefill engine's notice, without waiting for its HTTP answer. Between
    engines on CPUs that was not measurably faster."""

    on_timeout: OnTimeout = "recompute"
    """What happens to a prompt whose notices do not come within `deadlines.kv_ready`: an engine computes what is missing, or
    the request fails with 504."""


class Registration(Section, frozen=True):
    """The ZMQ socket at which engines register. It is bound if the connector's engines do that."""

    host: Host = "127.0.0.1"
    """Address to bind: one that every engine can reach. Who else can reach it can register an engine before that engine does."""

    port: Port | None = None
    """TCP port: the `proxy_port` or `proxy_ping_port` in the engines' configuration. None: that of vLLM's examples, 30001 for
    p2p-nccl and 36367 for moriio."""

    timeout: Seconds = 5.0
    """Without a heartbeat for so long, an engine takes part in no KV transfer. vLLM's engines send one every 3 seconds."""


class Settings(Section, frozen=True):
    """All settings."""

    listen: Listen = Listen()
    """Where clients reach the proxy."""

    auth: Auth = Auth()
    """Keys of clients and of engines."""

    pools: tuple[Pool, ...] = ()
    """The engines. Only one pool is supported for now; after `load` there is always exactly one."""

    deadlines: Deadlines = Deadlines()
    """How long each wait may last."""

    limits: Limits = Limits()
    """How much is accepted at once."""

    overload: Overload = Overload()
    """Who is served first while requests wait."""
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

    observe: Observe = Observe()
    """Logs."""

    @property
    def pool(self) -> Pool:
        """The one pool."""
        return self.pools[0]
