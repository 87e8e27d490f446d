"""The settings as one typed tree, so that every room is handed values that are already right.

Owns names, units, bounds and defaults. `pdproxy.settings.load` fills the tree, `pdproxy.settings.crosscheck` says what
no single field can, and `configs/reference.yaml` shows all of it to operators: a new field is added there as well.
Longer than other files on purpose: it is the one page on which all of the tree is read.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Role = Literal["prefill", "decode", "aggregated"]
Connector = Literal["nixl", "lmcache-pd", "lmcache-mp", "shared", "kvstore-keys"]
FirstTokenFrom = Literal["prefill", "decode"]
OnTimeout = Literal["recompute", "fail"]
VLLM_BOOTSTRAP_PORT = 8998
"""vLLM's default for VLLM_MOONCAKE_BOOTSTRAP_PORT. vllm-omni assumes 25201 where its stages name none."""
Policy = Literal["least_load"]
Tokenize = Literal["off", "auto", "always"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

# A week is longer than any wait that makes sense, and keeps infinity away from the event loop's timers.
Seconds = Annotated[float, Meta(gt=0, le=604_800)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Text = Annotated[str, Meta(min_length=1)]
# A key travels in a header: a blank, a line break or a letter beyond ASCII in it could never match, or would split it.
Key = Annotated[str, Meta(pattern=r"\A[\x21-\x7e]+\Z", description="a key of visible ASCII characters without blanks")]
File = Annotated[str, Meta(min_length=1, pattern=r"\A[^\x00]+\Z", description="a file's name")]
Host = Annotated[str, Meta(pattern=r"\A[^\s/\[\]]+\Z", description="a host name or a bare address")]
Port = Annotated[int, Meta(ge=1, le=65_535)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all sections share: immutable, filled by name, no field that the schema doesn't know."""


class ListenTls(_Section, frozen=True):
    """TLS for clients. Files are PEM, and are read again when they change."""

    certificate: File | None = None
    """The server's certificate with its chain. None: plain HTTP."""

    key: File | None = None
    """Its private key. None: the certificate's file holds it, too."""

    key_password_file: File | None = None
    """The key's password, on the first line of a file. None: the key is not encrypted."""

    client_ca: File | None = None
    """Authorities of client certificates. With it, a client without such a certificate gets no connection."""


class Cors(_Section, frozen=True):
    """What browsers of other sites may do. Names and defaults of vLLM's flags."""

    allowed_origins: tuple[Text, ...] = ()
    """Origins whose pages may read answers; `*` is every one. None by default."""

    allow_credentials: bool = False
    """Whether such pages may send cookies and the like."""

    allowed_methods: tuple[Text, ...] = ("*",)
    """Methods that they may use; `*` is every one."""

    allowed_headers: tuple[Text, ...] = ("*",)
    """Headers that they may send; `*` is every one."""


class Listen(_Section, frozen=True):
    """Where clients reach the proxy."""

    host: Host = "127.0.0.1"
    """Address to bind. The loopback, because a proxy that is open to a network should have been asked to be."""

    port: Port = 8000
    """TCP port. The one that `vllm serve` takes too, so that clients need no change."""

    tls: ListenTls = ListenTls()
    """TLS for clients."""
    cors: Cors = Cors()
    """What browsers of other sites may do."""


class Auth(_Section, frozen=True):
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


class Facts(_Section, frozen=True):
    """What an engine is known to be before it has been asked."""

    block_size: Count | None = None
    """Tokens in a KV block. None: read from the engine's metrics."""

    tensor_parallel_size: Count | None = None
    """GPUs that share its weights. None: not known. Nothing asks for it but the checks of a stage configuration."""

    engine_id: Text | None = None
    """The `engine_id` of its `--kv-transfer-config`. None: it makes one up at each start."""

    bootstrap: Text | None = None
    """A prefill engine's Mooncake bootstrap server, `http://host:port`. None: its own host, at the pool's `bootstrap_port`."""


class EngineTls(_Section, frozen=True):
    """TLS towards engines with an `https://` URL. Files are PEM, and are read again when they change."""

    ca: File | None = None
    """Authorities that engines' certificates are trusted by. None: those of the system."""

    certificate: File | None = None
    """Our own certificate, for engines that ask for one. None: we have none."""

    key: File | None = None
    """Its private key. None: the certificate's file holds it, too."""

    verify: bool | None = None
    """False trusts any certificate of any host: whoever is in between reads prompts and keys. None: true."""


class Receiver(_Section, frozen=True):
    """Where a decode engine's ranks receive KV. LMCache's `pd_peer_init_port` and `pd_peer_alloc_port`, a port a rank."""

    host: Host | None = None
    """LMCache's `pd_peer_host`. None: the host of the engine's URL."""

    init_ports: tuple[Port, ...] = ()
    """For setting a transfer up, in the order of ranks."""

    alloc_ports: tuple[Port, ...] = ()
    """For asking for room, in the order of ranks."""


class LMCache(_Section, frozen=True):
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


class Node(_Section, frozen=True):
    """One engine: a vLLM server with an HTTP port of its own."""

    url: str
    """Where it listens, `http://host:port` or `https://host:port`. Also its name in logs and metrics."""

    role: Role
    """What it does for a request: make the KV, use it, or both by itself."""

    sources: tuple[Text, ...] = ()
    """URLs of the prefill engines whose KV a decode engine takes. None given: every one's in the pool."""

    labels: dict[str, str] = {}
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


class PoolPolicy(_Section, frozen=True):
    """How an engine is chosen among those that are fit for a request."""

    prefill: Policy = "least_load"
    """For the prefill leg. Least outstanding prompt bytes: what a prefill engine's time goes into."""

    decode: Policy = "least_load"
    """For the decode leg. Fewest active streams: what a decode engine's step time grows with."""


class Pool(_Section, frozen=True):
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


class Deadlines(_Section, frozen=True):
    """How long each wait may last, in seconds. No wait is without one."""

    connect: Seconds = 2.0
    """TCP connection to an engine, TLS handshake included. One that takes longer inside a data center is down or drowning."""

    client_head: Seconds = 30.0
    """A request's line and headers, from their first byte, or from the connection on where nothing comes at all."""

    client_body: Seconds = 60.0
    """A request's body, once its head is here. A body is sent at once; a client that drips one holds a connection."""

    queue: Seconds = 30.0
    """A request's wait for a place (`limits.max_inflight`). Clients give up at about this time."""

    tokenize: Seconds = 2.0
    """Making the token ids of a prompt. Past it the engines make them, unless the connector needs them first."""

    prefill: Seconds = 120.0
    """The prefill leg, from its request to its whole answer. Long prompts behind others take a minute."""

    kv_ready: Seconds = 10.0
    """Notices that KV is ready, from the prefill's answer on. They come within milliseconds of it, or not at all."""

    first_token: Seconds = 60.0
    """From the decode leg's request to its first data: KV transfer, and waiting for a place in its batch."""

    between_tokens: Seconds = 30.0
    """Between two pieces of a stream. A batch that was preempted pauses for seconds; more is a hang."""

    client_write: Seconds = 60.0
    """A client that doesn't read its answer, before it is dropped: its stream holds KV on an engine."""

    abandoned_prefill: Seconds = 10.0
    """Grace for a prefill answer that nobody waits for any more: without it its KV can't be given back at once."""

    release: Seconds = 5.0
    """Giving KV back to a prefill engine. Past it, the engine's own lease ends the matter."""

    drain: Seconds = 60.0
    """Running requests after a request to stop. Keep it below the orchestrator's grace period."""

    total: Seconds = 3600.0
    """A whole request, whatever it waits for: the net under all others."""

    probe: Seconds = 2.0
    """One probe of an engine. A health route that answers later is not healthy."""


class Limits(_Section, frozen=True):
    """How much is taken on, and how often something is tried."""

    max_inflight: Count = 1024
    """Requests being served at once. Above what a few engines batch, below what would hurt the proxy."""

    max_queue: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 1024
    """Requests waiting for a place; one more is refused with 503. 0: nobody waits."""

    max_body_bytes: Count = 67_108_864
    """Largest request body in bytes, 64 MiB: a few images in base64, or more text than any context holds."""

    max_buffered_bytes: Count = 1_073_741_824
    """Bytes of all requests' bodies that are held at once, read or in service, 1 GiB. One more is refused with 503."""

    max_header_bytes: Count = 65_536
    """Largest request line with headers in bytes, 64 KiB: several times what other servers take."""

    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Tries of one request before its first data, the first included. After data nothing is tried again."""

    engine_keepalive: Seconds = 4.0
    """Seconds an idle engine connection may be used again. vLLM closes it after 5: a second is left for the race."""

    breaker_failures: Count = 3
    """Failures of an engine in a row that shut it out. One may be chance, three are not."""

    breaker_cooldown: Seconds = 5.0
    """Seconds an engine stays shut out. Long enough for a restart to be noticed, short enough to come back soon."""


class KvReady(_Section, frozen=True):
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


class Probes(_Section, frozen=True):
    """How often engines are asked how they are, in seconds."""

    interval: Seconds = 2.0
    """Between two probes of an engine's health: the time a dead engine can go unnoticed without traffic."""

    scrape_interval: Seconds = 5.0
    """Between two readings of an engine's metrics, which cost it more than a probe."""


class Observe(_Section, frozen=True):
    """What the proxy says about itself."""

    log_level: LogLevel = "info"
    """Least severe record that is written. Prompts and keys are in none."""

    log_format: LogFormat = "text"
    """`text` for eyes, `json` for a log collector: one object a line."""


class Settings(_Section, frozen=True):
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
