"""The configuration of a simulated engine: what an operator would set with vLLM's flags.

Owns names and defaults. Times are in seconds, sizes in bytes or tokens.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from pdproxy.engine_model.hardware import Hardware

Role = Literal["encode", "prefill", "decode", "aggregated", "any"]
LoadFailurePolicy = Literal["fail", "recompute"]
KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
ECRole = Literal["ec_producer", "ec_consumer", "ec_both"]
ECConnectorName = Literal["ECExampleConnector", "ECCPUConnector", "ECMooncakeConnector"]
Template = Literal["chatml", "dated", "plain"]
ConnectorName = Literal[
    "nixl",
    "nixl-push",
    "mooncake",
    "lmcache-pd",
    "lmcache-mp",
    "shared",
    "kvstore-keys",
    "cpu",
    "p2p-nccl",
    "moriio",
    "none",
]


_ANY: tuple[ConnectorName, ...] = ("nixl", "nixl-push", "mooncake", "lmcache-mp", "shared")
"""Connectors whose engines can make KV for others and use others' KV, with `kv_role` `kv_both`."""


class LMCacheFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LMCache's configuration, by its names; defaults are those of 0.5.6 and its examples."""

    chunk_size: int = 256
    pd_backend_mode: Literal["async", "sync"] = "async"
    pd_peer_init_port: int = 7300
    """D: the first rank's; 0: any free one."""
    pd_peer_alloc_port: int = 7400
    pd_buffer_size: int = 2 << 30
    """D: bytes of each rank."""
    pd_allocation_timeout_sec: float = math.inf
    """D: how long a push waits for space (`async`)."""
    skip_last_n_tokens: int = 0
    """D: how many of a prompt's last tokens are not looked up. With P's first token it must be 1,
    to find unfilled chunks.
    """
    discard_partial_chunks: bool = False
    """P: push only full chunks. PD always enables `save_unfull_chunk`, so this option is needed for
    that.
    """
    save_only_first_rank: bool = False
    """As with MLA."""
    notice_type: Literal["ProxyNotif", "NixlProxyNotif", "untagged"] = "ProxyNotif"
    degraded: bool = False
    """LMCache failed to start: the engine is healthy, stores nothing, loads nothing and sends no
    notices.
    """

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")
        for name in ("pd_peer_init_port", "pd_peer_alloc_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be 0 to 65535, got {getattr(self, name)}")
        for name in ("pd_buffer_size", "pd_allocation_timeout_sec", "skip_last_n_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


class CpuBuffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `kv_connector_extra_config` of the connector `cpu`: where P pushes to and D listens, and
    the size of their buffers.
    """

    cpu_host: str = "127.0.0.1"
    cpu_port: int = 0
    """D: 0 is any free one. P: its decode engine's."""
    cpu_size: float = 1.0
    """GiB of an engine's buffer."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if not 0 <= self.cpu_port <= 65535:
            raise ValueError(f"cpu_port must be 0 to 65535, got {self.cpu_port}")
        if self.cpu_size <= 0:
            raise ValueError(f"cpu_size must be above 0, got {self.cpu_size}")

    @property
    def bytes(self) -> int:
        """The size of a buffer in bytes."""
        return int(self.cpu_size * (1 << 30)) & ~0xFFF


class MooncakeFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mooncake's configuration: vLLM's environment variables, and `num_workers` of its
    `kv_connector_extra_config`.
    """

    bootstrap_port: int = 8998
    """P: of its bootstrap server, `VLLM_MOONCAKE_BOOTSTRAP_PORT`; 0: any free one."""
    abort_request_timeout: float = 480.0
    """`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`: P's lease, and how long it lets a D wait for a prompt
    that it does not have.
    """
    connector_timeout: float = 30.0
    """D: for one question to a bootstrap server, `VLLM_MOONCAKE_CONNECTOR_TIMEOUT`."""
    num_workers: int = 10
    """P: half the number of questions that it handles at once. One that waits for its prompt
    counts; others queue behind it.
    """

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if not 0 <= self.bootstrap_port <= 65535:
            raise ValueError(f"bootstrap_port must be 0 to 65535, got {self.bootstrap_port}")
        for name in ("abort_request_timeout", "connector_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {self.num_workers}")


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`: names and defaults are its own."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    """None: zmq if events are enabled."""
    endpoint: str = "tcp://*:5557"
    """A host that is a wildcard is bound, any other is connected to; further ranks take the ports
    after it.
    """
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Messages that a replay can have again."""
    hwm: int = 100_000
    """Messages that wait for a slow subscriber. It loses more of them."""
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        """Fill in the publisher; refuse invalid values."""
        if self.publisher is None:
            msgspec.structs.force_setattr(
                self, "publisher", "zmq" if self.enable_kv_cache_events else "null"
            )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("endpoint", "replay_endpoint"):
            if not (getattr(self, name) or "tcp://").startswith(("tcp://", "ipc://")):
                raise ValueError(f"{name} must begin with tcp://, got {getattr(self, name)!r}")

    @property
    def publishes(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


class ECExtraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's `ec_connector_extra_config`: names and defaults are its own. It ignores other keys."""

    shared_storage_path: str = "/tmp"  # noqa: S108 - vLLM's default
    """ECExampleConnector: the folder that engines share."""
    ec_cpu_bytes: int = 0
    """ECCPUConnector: bytes of encoder outputs that an engine keeps."""
    ec_enable_nixl: bool = False
    """ECCPUConnector: whether consumers read the outputs of other engines."""
    consumer_ack_timeout_s: float = 30.0
    """ECCPUConnector: seconds for which a consumer waits for one answer of a producer."""
    push_wait_timeout_s: float = 60.0
    """ECMooncakeConnector: seconds for which a consumer waits for a push."""
    control_timeout_s: float = 30.0
    """ECMooncakeConnector: seconds for which a producer waits for one answer of a consumer."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name in ("consumer_ack_timeout_s", "push_wait_timeout_s", "control_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


class ECTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--ec-transfer-config`: names and defaults are its own."""

    ec_connector: ECConnectorName
    ec_role: ECRole
    engine_id: str | None = None
    ec_ip: str = "127.0.0.1"
    """ECMooncakeConnector: where a consumer listens for producers."""
    ec_port: int = 14579
    """Its TCP port; 0, which vLLM does not have: any free one."""
    ec_buffer_size: float = 1e9
    """ECMooncakeConnector: bytes of outputs that wait at a consumer for their requests."""
    ec_buffer_device: str | None = "cuda"
    ec_connector_extra_config: ECExtraConfig = ECExtraConfig()
    ec_connector_module_path: str | None = None

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if not 0 <= self.ec_port <= 65535:
            raise ValueError(f"ec_port must be 0 to 65535, got {self.ec_port}")
        if self.ec_buffer_size <= 0:
            raise ValueError(f"ec_buffer_size must be above 0, got {self.ec_buffer_size}")
        if self.ec_connector == "ECCPUConnector" and self.extra.ec_cpu_bytes < 1:
            raise ValueError("ec_cpu_bytes must be specified in ec_connector_extra_config")

    @property
    def extra(self) -> ECExtraConfig:
        """`ec_connector_extra_config`."""
        return self.ec_connector_extra_config

    @property
    def is_producer(self) -> bool:
        """Whether it stores encoder outputs for others."""
        return self.ec_role != "ec_consumer"

    @property
    def is_consumer(self) -> bool:
        """Whether it loads encoder outputs of others."""
        return self.ec_role != "ec_producer"

    @property
    def listens(self) -> bool:
        """Whether other engines reach it: those that read its outputs, or push theirs."""
        if self.ec_connector == "ECCPUConnector":
            return self.is_producer and self.extra.ec_enable_nixl
        return self.ec_connector == "ECMooncakeConnector" and self.is_consumer


class SimFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. Names are vLLM's flags where it has one."""

    role: Role = "aggregated"
    model: str = "sim"
    version: str = "0.32.0"
    """What it does as this version: `since`."""
    weights: int = 0
    """A number. Engines with the same model name and different weights generate different text."""
    template: Template = "chatml"
    """The chat template. `dated` prints the date into the prompt, `plain` no role marks."""
    add_bos: bool = False
    """Whether the tokenizer puts its first token before a completion's prompt, as Llama's does."""
    block_size: int = 16
    num_gpu_blocks: int = 8192
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    """Streams have a usage in each event and at their end, whatever the client asks for."""
    enable_auto_tool_choice: bool = True
    """With a tool-call parser; without, `tools` is refused as vLLM refuses it."""
    enable_scale_out: bool = False
    """Chats are rendered and derendered, and token ids generated, on routes of their own."""
    enable_cohere_api: bool = False
    """`/cohere/v2/chat` is there, as with VLLM_ENABLE_COHERE_API=1."""
    vision: bool = False
    """A model that also sees pictures in chats."""
    speech: bool = False
    """A model that also writes down audio, on routes of their own."""
    realtime: bool = False
    """A model that also writes down audio while it comes, on a WebSocket."""
    enable_tokenizer_info_endpoint: bool = False
    enable_server_load_tracking: bool = False
    runtime_lora: bool = False
    """LoRA adapters can be loaded and unloaded while it runs."""
    reasoning_parser: Literal["none", "deepseek_r1"] = "none"
    """Separates thoughts from a chat's content. With a parser, the model ends its thoughts with
    `</think>`.
    """
    api_key: str | None = None
    eos_every: int = 97
    """The average number of tokens before the end token; 0: never."""
    connector: ConnectorName = "nixl"
    engine_id: str | None = None
    """nixl-push, mooncake: the id that other engines know it by, as in `--kv-transfer-config`;
    None: a new one at each start.
    """
    kv_role: KVRole | None = None
    """None: from role and connector. It affects only metrics: `vllm:num_requests_kv_fetch_by_stage`
    is a consumer's.
    """
    tensor_parallel_size: int = 1
    """The number of workers, each of which sends notices."""
    data_parallel_size: int = 1
    """The number of ranks behind one port, each with its own id for other engines, side channel,
    memory and counters.
    """
    notify: str | None = None
    """Where notices go: a ZMQ PULL socket `tcp://HOST:PORT` (lmcache-pd; nixl, as with the
    notifier), a URL (lmcache-mp).
    """
    shared_storage_path: str = ""
    """shared, lmcache-mp, kvstore-keys: the folder that engines share; empty: this engine's own
    memory.
    """
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    kv_lease_duration: float = 30.0
    heartbeat_interval: float = 5.0
    handshake_timeout: float = 5.0
    bidirectional_kv_xfer: bool = False
    """Whether D keeps the KV of its answers for the next turn, and P pulls it (nixl). Each engine
    has its own setting.
    """
    decoder_kv_blocks_ttl: float = 480.0
    kv_recompute_threshold: int = 64
    """P computes fewer tokens itself, rather than pull them from D."""
    side_channel_host: str = "127.0.0.1"
    """The address in P's handles, on which the engine listens; on loopback if the machine does not
    have it.
    """
    side_channel_port: int = 0
    """0: any free port."""
    register: str | None = None
    """p2p-nccl, moriio: where it registers, a ZMQ ROUTER socket `tcp://HOST:PORT`; None: it
    doesn't.
    """
    registered_as: str = ""
    """The HTTP address that it registers; empty: where it listens."""
    registration_interval: float = 3.0
    """Seconds between two heartbeats."""
    kv_port: int = 0
    """p2p-nccl, moriio: the port on which other engines reach it; 0: any free one."""
    transfer_mode: Literal["READ", "WRITE"] = "WRITE"
    """moriio: who moves the KV."""
    defer_timeout: float = 60.0
    """moriio: seconds that P keeps blocks that nobody takes."""
    randomize_request_ids: bool = True
    """p2p-nccl: False is VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1, without which the engines know a
    request by different ids.
    """
    kv_events: KvEventsConfig | None = None
    """What it publishes of its KV blocks; None: nothing."""
    ec_transfer_config: ECTransferConfig | None = None
    """How encoder outputs are transferred; None: not at all."""
    ec_side_channel_host: str = "127.0.0.1"
    """ECCPUConnector: the address of a producer, which its answers name,
    `VLLM_EC_SIDE_CHANNEL_HOST`.
    """
    ec_side_channel_port: int = 0
    """Its TCP port, `VLLM_EC_SIDE_CHANNEL_PORT`; 0: any free one."""
    hardware: Hardware = Hardware()
    lmcache: LMCacheFacts = LMCacheFacts()
    cpu: CpuBuffer = CpuBuffer()
    mooncake: MooncakeFacts = MooncakeFacts()

    def __post_init__(self) -> None:
        """Refuse what vLLM refuses. An engine that only encodes has no prefix cache, as there."""
        if self.encodes_only:
            msgspec.structs.force_setattr(self, "enable_prefix_caching", False)
        for name in (
            "block_size",
            "num_gpu_blocks",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "tensor_parallel_size",
            "data_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "kv_lease_duration",
            "heartbeat_interval",
            "handshake_timeout",
            "registration_interval",
            "defer_timeout",
            "decoder_kv_blocks_ttl",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not self.model:
            raise ValueError("model must not be empty")
        if (self.num_gpu_blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(
                f"num_gpu_blocks = {self.num_gpu_blocks} blocks of {self.block_size} tokens hold "
                f"less than one request"
                f" of max_model_len = {self.max_model_len}"
            )
        self._check_connector()
        self._check_ec_connector()

    def _check_ec_connector(self) -> None:
        if not 0 <= self.ec_side_channel_port <= 65535:
            raise ValueError(
                f"ec_side_channel_port must be 0 to 65535, got {self.ec_side_channel_port}"
            )
        if (self.role == "encode") != self.encodes_only:
            raise ValueError(
                f"role must be encode with ec_role = ec_producer, and only then, got {self.role}"
            )
        if self.encodes_only and not self.vision:
            raise ValueError(
                "vision must be true with role = encode: An EC producer-only instance requires a "
                "multimodal model."
            )
        if self.encodes_only and self.connector != "none":
            raise ValueError(
                f"connector must be none with role = encode: it has no KV, got {self.connector}"
            )
        config = self.ec_transfer_config
        if config is not None and config.listens and self.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size must be 1 with ec_connector = {config.ec_connector}"
            )

    def _check_connector(self) -> None:
        if not 0 <= self.kv_port <= 65535:
            raise ValueError(f"kv_port must be 0 to 65535, got {self.kv_port}")
        if self.register is not None and not (
            self.registers and self.register.startswith("tcp://")
        ):
            wanted = (
                "must begin with tcp://"
                if self.registers
                else f"must be left out with connector = {self.connector}"
            )
            raise ValueError(f"register {wanted}, got {self.register!r}")
        if self.registers and self.data_parallel_size > 1:
            raise ValueError(f"data_parallel_size must be 1 with connector = {self.connector}")
        if self.registers and self.role == "aggregated":
            raise ValueError(
                f"role must be prefill or decode with connector = {self.connector}, got aggregated"
            )
        scheme = {"nixl": "tcp://", "lmcache-pd": "tcp://", "lmcache-mp": "http://"}.get(
            self.connector
        )
        if self.notify is not None and (scheme is None or not self.notify.startswith(scheme)):
            wanted = (
                f"must begin with {scheme}"
                if scheme
                else f"must be left out with connector = {self.connector}"
            )
            raise ValueError(f"notify {wanted}, got {self.notify!r}")
        if self.data_parallel_size > 1 and self.connector == "lmcache-pd":
            raise ValueError(
                f"data_parallel_size must be 1 with connector = lmcache-pd, got "
                f"{self.data_parallel_size}"
            )
        if self.side_channel_port + self.data_parallel_size > 65536:
            raise ValueError(
                f"side_channel_port must leave one port per rank, got {self.side_channel_port}"
            )
        if self.engine_id is not None and self.connector not in ("nixl-push", "mooncake"):
            raise ValueError(
                f"engine_id must be left out with connector = {self.connector}, got "
                f"{self.engine_id!r}"
            )
        if self.engine_id == "":
            raise ValueError("engine_id must not be empty")
        if self.connector.startswith("lmcache") and self.lmcache.chunk_size % self.block_size:
            raise ValueError(
                f"chunk_size must be a multiple of block_size = {self.block_size}, got "
                f"{self.lmcache.chunk_size}"
            )
        if self.role == "any" and self.connector not in _ANY:
            raise ValueError(
                f"role must not be any with connector = {self.connector}: its engines have one role"
            )
        if self.connector == "cpu" and self.role == "aggregated":
            raise ValueError("role must be prefill or decode with connector = cpu, got aggregated")
        if self.connector == "cpu" and self.role == "prefill" and not self.cpu.cpu_port:
            raise ValueError(
                "cpu_port must be given: a prefill engine pushes to this port of its decode engine"
            )
        if self.connector != "lmcache-pd":
            return
        if self.role == "aggregated":
            raise ValueError(
                "role must be prefill or decode with connector = lmcache-pd, got aggregated"
            )
        if self.role == "prefill" and self.notify is None:
            raise ValueError(
                "notify must be given: LMCache's sender does not start without pd_proxy_host and "
                "pd_proxy_port"
            )
        if not self.pd_buffer_chunks:
            raise ValueError(
                f"pd_buffer_size must hold a chunk at least, got {self.lmcache.pd_buffer_size}"
            )

    @property
    def encodes_only(self) -> bool:
        """Whether it computes nothing but encoder outputs, and has no KV."""
        config = self.ec_transfer_config
        return config is not None and not config.is_consumer

    @property
    def has_nixl(self) -> bool:
        """Whether its KV moves by NIXL."""
        return self.connector in ("nixl", "nixl-push")

    @property
    def registers(self) -> bool:
        """Whether engines with this connector register."""
        return self.connector in ("p2p-nccl", "moriio")

    @property
    def pd_ranks(self) -> int:
        """Workers that push and receive KV with LMCache."""
        return 1 if self.lmcache.save_only_first_rank else self.tensor_parallel_size

    @property
    def pd_buffer_chunks(self) -> int:
        """Chunks that the PD buffer of one rank holds."""
        per_chunk = (
            max(self.hardware.kv_bytes_per_token // self.pd_ranks, 1) * self.lmcache.chunk_size
        )
        return self.lmcache.pd_buffer_size // per_chunk

    @property
    def mooncake_role(self) -> KVRole:
        """The `kv_role` of an engine with Mooncake, which checks it for each request."""
        usual: dict[Role, KVRole] = {"prefill": "kv_producer", "decode": "kv_consumer"}
        return self.kv_role or usual.get(self.role, "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether vLLM would call this engine a consumer of KV."""
        usual: KVRole = "kv_consumer" if self.role == "decode" else "kv_producer"
        if self.connector in ("lmcache-mp", "shared") or self.role == "any":
            usual = "kv_both"
        return self.connector != "none" and (self.kv_role or usual) != "kv_producer"

    @property
    def takes_metadata(self) -> bool:
        """Whether a request may name an encoder output by its size alone: vLLM's
        `allow_missing_mm_embeddings`.
        """
        config = self.ec_transfer_config
        return self.is_kv_consumer or (config is not None and config.is_consumer)
