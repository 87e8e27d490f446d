"""The settings as one typed tree, so that every room is handed values that are already right.

Owns names, units, bounds and defaults. `pdproxy.settings.load` fills the tree, `pdproxy.settings.crosscheck` says what
no single field can, and `configs/reference.yaml` shows all of it to operators: a new field is added there as well.
"""

from __future__ import annotations

from typing import Literal

from pdproxy.scheduling.policies import PolicyName as Policy
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.settings.section import Count, File, Host, Key, Port, Seconds, Section, Text

Role = Literal["prefill", "decode", "aggregated"]
Connector = Literal["nixl", "lmcache-pd", "lmcache-mp", "shared", "kvstore-keys"]
FirstTokenFrom = Literal["prefill", "decode"]
OnTimeout = Literal["recompute", "fail"]
VLLM_BOOTSTRAP_PORT = 8998
"""vLLM's default for VLLM_MOONCAKE_BOOTSTRAP_PORT. vllm-omni assumes 25201 where its stages name none."""
Tokenize = Literal["off", "auto", "always"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class ListenTls(Section, frozen=True):
    """TLS for clients. Files are PEM, and are read again when they change."""

    certificate: File | None = None
    """The server's certificate with its chain. None: plain HTTP."""

    key: File | None = None
    """Its private key. None: the certificate's file holds it, too."""

    key_password_file: File | None = None
    """The key's password, on the first line of a file. None: the key is not encrypted."""

    client_ca: File | None = None
    """Authorities of client certificates. With it, a client without such a certificate gets no connection."""


class Cors(Section, frozen=True):
    """What browsers of other sites may do. Names and defaults of vLLM's flags."""

    allowed_origins: tuple[Text, ...] = ()
    """Origins whose pages may read answers; `*` is every one. None by default."""

    allow_credentials: bool = False
    """Whether such pages may send cookies and the like."""

    allowed_methods: tuple[Text, ...] = ("*",)
    """Methods that they may use; `*` is every one."""

    allowed_headers: tuple[Text, ...] = ("*",)
    """Headers that they may send; `*` is every one."""


class Listen(Section, frozen=True):
    """Where clients reach the proxy."""

    host: Host = "127.0.0.1"
    """Address to bind. The loopback, because a proxy that is open to a network should have been asked to be."""

    port: Port = 8000
    """TCP port. The one that `vllm serve` takes too, so that clients need no change."""

    trusted_proxies: tuple[Text, ...] = ()
    """Addresses or networks of proxies in front of this one. Of a request from there, the last address in
    `X-Forwarded-For` that is none of theirs is the client's. Anybody else's header is not read: a client could name any
    address."""

    tls: ListenTls = ListenTls()
    """TLS for clients."""
    cors: Cors = Cors()
    """What browsers of other sites may do."""


class Auth(Section, frozen=True):
    """Who may use the proxy, and who the proxy is to the engines."""

    api_keys: tuple[Key, ...] = ()
    """Keys of clients. With any set, a client's `Authorization` is checked and consumed; without, it goes on to the
    engines, which then decide."""

    api_keys_file: File | None = None
    """More keys of clients, one a line; blank lines and lines that begin with `#` are skipped. Read again when it changes."""

    engine_api_key: Key | None = None
    """Key for the engines, sent as a bearer token by probes, and for clients that brought one of `api_keys`. Without
    those, a client's own `Authorization` goes on instead. None: the engines want none."""

    engine_api_key_file: File | None = None
    """A file that holds the engines' key, in place of `engine_api_key`. Read again when it changes."""

    def __repr__(self) -> str:
        # Settings end up in logs and tracebacks; keys must not.
        key = "set" if self.engine_api_key or self.engine_api_key_file else "not set"
        return f"Auth(<{len(self.api_keys)} api_keys>, <engine_api_key {key}>)"


class Facts(Section, frozen=True):
    """What an engine is known to be before it has been asked."""

    block_size: Count | None = None
    """Tokens in a KV block. None: read from the engine's metrics."""

    tensor_parallel_size: Count | None = None
    """GPUs that share its weights. None: not known. Nothing asks for it but the checks of a stage configuration."""

    engine_id: Text | None = None
    """The `engine_id` of its `--kv-transfer-config`. None: it makes one up at each start."""

    bootstrap: Text | None = None
    """A prefill engine's Mooncake bootstrap server, `http://host:port`. None: its own host, at the pool's `bootstrap_port`."""


class EngineTls(Section, frozen=True):
    """TLS towards engines with an `https://` URL. Files are PEM, and are read again when they change."""

    ca: File | None = None
    """Authorities that engines' certificates are trusted by. None: those of the system."""

    certificate: File | None = None
    """Our own certificate, for engines that ask for one. None: we have none."""

    key: File | None = None
    """Its private key. None: the certificate's file holds it, too."""

    verify: bool | None = None
    """False trusts any certificate of any host: whoever is in between reads prompts and keys. None: true."""


class Receiver(Section, frozen=True):
    """Where a decode engine's ranks receive KV. LMCache's `pd_peer_init_port` and `pd_peer_alloc_port`, a port a rank."""

    host: Host | None = None
    """LMCache's `pd_peer_host`. None: the host of the engine's URL."""

    init_ports: tuple[Port, ...] = ()
    """For setting a transfer up, in the order of ranks."""

    alloc_ports: tuple[Port, ...] = ()
    """For asking for room, in the order of ranks."""


class LMCache(Section, frozen=True):
    """What LMCache's PD mode must be known to do. Names and defaults of its configuration."""

    first_token: FirstTokenFrom = "prefill"  # noqa: S105 - a token of text
    """Whose token is the answer's first. `prefill` saves a step; requests that need the parsers or look back at their own
    output get it from the decode engine all the same. `decode`: all do."""

    chunk_size: Count = 256
    """Tokens in a chunk."""

    save_unfull_chunk: bool = False
    """Whether prompts under a chunk are worth two engines. LMCache 0.5.6's PD mode moves unfull chunks whatever its own setting
    says, unless its `discard_partial_chunks` is on: then nobody would tell of such a prompt, and it would wait in vain."""

    first_rank_only: bool = False
    """Whether the first rank stores for all (models with one latent KV for all heads), and sends the only notice."""

    pd_buffer_size: Count | None = None
    """Bytes of a decode engine's receive buffer. With it and `kv_bytes_per_token`, a prompt waits for room in it before it
    is prefilled. None: no bound is known."""

    kv_bytes_per_token: Count | None = None
    """Bytes of KV a token, on one rank: 2 x layers x KV heads x head size x bytes of the type, over the ranks."""


class Node(Section, frozen=True):
    """One engine: a vLLM server with an HTTP port of its own."""

    url: str
    """Where it listens, `http://host:port` or `https://host:port`. Also its name in logs and metrics."""

    role: Role
    """What it does for a request: make the KV, use it, or both by itself."""

    sources: tuple[Text, ...] = ()
    """URLs of the prefill engines whose KV a decode engine takes. None given: every one's in the pool."""

    labels: dict[str, str] = {}  # noqa: RUF012 - a struct copies its defaults
    """Free text by name, for the operator. Nothing is decided by it yet."""

    facts: Facts = Facts()
    """What is known beforehand."""

    receiver: Receiver = Receiver()
    """Where it receives KV, for connectors whose prefill engines push it (lmcache-pd)."""

    api_key: Key | None = None
    """This engine's key, in place of `auth.engine_api_key`."""

    api_key_file: File | None = None
    """A file that holds it. Read again when it changes."""

    tls: EngineTls = EngineTls()
    """TLS towards this engine: what is set here is stronger than what the pool says."""

    def __repr__(self) -> str:
        key = "set" if self.api_key or self.api_key_file else "not set"
        return f"Node({self.url}, {self.role}, <api_key {key}>)"


class PoolPolicy(Section, frozen=True):
    """How an engine is chosen among those that are fit for a request."""

    prefill: Policy = "least_load"
    """For the prefill leg. Least outstanding prompt bytes: what a prefill engine's time goes into."""

    decode: Policy = "least_load"
    """For the decode leg. Fewest active streams: what a decode engine's step time grows with."""


class Pool(Section, frozen=True):
    """Engines that can work together, and how."""

    name: Text = "default"
    """The pool's name in logs."""

    connector: Connector = "nixl"
    """How KV gets from prefill to decode engines: the `kv_connector` they were started with."""

    lmcache: LMCache = LMCache()
    """What the connector lmcache-pd must know."""

    bootstrap_port: Port = VLLM_BOOTSTRAP_PORT
    """Where a prefill engine's Mooncake bootstrap server listens, if nothing more is known. vLLM's own default; vllm-omni's
    files assume 25201."""

    tokenize: Tokenize = "auto"
    """Whether prompts become token ids here: never, only where the connector needs them, or wherever that spares an
    engine the same work."""

    tokenizer: File | None = None
    """A model's folder with its tokenizer and chat template. None: the one that the engines say they loaded, if it is on
    this machine."""

    policy: PoolPolicy = PoolPolicy()
    """How engines are chosen."""

    tls: EngineTls = EngineTls()
    """TLS towards the engines."""

    nodes: tuple[Node, ...] = ()
    """The engines. Those named by flags are added behind these."""


class KvReady(Section, frozen=True):
    """The ZMQ socket on which engines tell that KV is ready. It is bound where the connector has such notices."""

    host: Host = "127.0.0.1"
    """Address to bind: one that every prefill rank reaches. Whoever reaches it can send notices."""

    port: Port = 7500
    """TCP port: LMCache's `pd_proxy_port`. Its own example proxy takes 8500."""

    notifier: bool = False
    """Whether engines of connector nixl carry pdproxy's notifier (`pdproxy notifier`). Then the socket is bound for them, too."""

    early: bool = False
    """With the notifier: ask the decode engine on the prefill engine's notice, without waiting for its HTTP answer. That was
    not measurably faster between engines on CPUs."""

    on_timeout: OnTimeout = "recompute"
    """What becomes of a prompt whose notices don't come in `deadlines.kv_ready`: the decode engine computes what it lacks,
    or the request fails with 504."""


class Probes(Section, frozen=True):
    """How often engines are asked how they are, in seconds."""

    interval: Seconds = 2.0
    """Between two probes of an engine's health: the time a dead engine can go unnoticed without traffic."""

    scrape_interval: Seconds = 5.0
    """Between two readings of an engine's metrics, which cost it more than a probe."""


class Observe(Section, frozen=True):
    """What the proxy says about itself."""

    log_level: LogLevel = "info"
    """Least severe record that is written. Prompts and keys are in none."""

    log_format: LogFormat = "text"
    """`text` for eyes, `json` for a log collector: one object a line."""


class Settings(Section, frozen=True):
    """Everything that can be configured."""

    listen: Listen = Listen()
    """Where clients reach the proxy."""

    auth: Auth = Auth()
    """Keys of clients and of engines."""

    pools: tuple[Pool, ...] = ()
    """The engines. One pool for now, and after `load` always exactly one."""

    deadlines: Deadlines = Deadlines()
    """How long each wait may last."""

    limits: Limits = Limits()
    """How much is taken on."""

    kv_ready: KvReady = KvReady()
    """Where engines tell that KV is ready."""

    probes: Probes = Probes()
    """How often engines are asked."""

    observe: Observe = Observe()
    """What the proxy says about itself."""

    @property
    def pool(self) -> Pool:
        """The one pool."""
        return self.pools[0]
