"""What a simulated engine is: the facts an operator would set with vLLM's flags, and how fast its hardware is.

Owns names and defaults; everything else in this room reads them. Times are in seconds, sizes in bytes or tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "aggregated"]
LoadFailurePolicy = Literal["fail", "recompute"]
KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
Template = Literal["chatml", "dated", "plain"]


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long things take. The defaults are an 8B model on one H200 with NVLink, from public measurements."""

    speed: float = 1.0
    """How many times faster than real; 0: nothing takes any time."""
    prefill_tokens_per_s: float = 40_000.0
    decode_step_s: float = 0.005
    """A step that decodes one sequence."""
    decode_step_per_seq_s: float = 0.000_03
    """What each further sequence adds to a step."""
    kv_bytes_per_token: int = 131_072
    link_bytes_per_s: float = 50e9
    transfer_latency_s: float = 0.001

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        for name in ("prefill_tokens_per_s", "link_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("speed", "decode_step_s", "decode_step_per_seq_s", "kv_bytes_per_token", "transfer_latency_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def step_s(self, prefill_tokens: int, decoding: int) -> float:
        """Return how long one step of the engine takes: prefill that runs along slows everybody's next token."""
        if not self.speed:
            return 0.0
        taken = prefill_tokens / self.prefill_tokens_per_s
        if decoding:
            taken += self.decode_step_s + (decoding - 1) * self.decode_step_per_seq_s
        return taken / self.speed

    def transfer_s(self, tokens: int) -> float:
        """Return how long the KV of so many tokens is on its way."""
        if not self.speed:
            return 0.0
        return (self.transfer_latency_s + tokens * self.kv_bytes_per_token / self.link_bytes_per_s) / self.speed


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. Names are vLLM's flags where it has one."""

    role: Role = "aggregated"
    model: str = "sim"
    version: str = "0.32.0"
    weights: int = 0
    """Two engines whose models have the same name and other weights differ in this, and in their text."""
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
    enable_auto_tool_choice: bool = True
    """With a tool-call parser; without, `tools` is refused as vLLM refuses it."""
    reasoning_parser: Literal["none", "deepseek_r1"] = "none"
    """Takes what the model thinks out of a chat's content. With one, the model ends its thoughts by `</think>`."""
    api_key: str | None = None
    eos_every: int = 97
    """One token in so many is the end, on average; 0: never."""
    connector: Literal["nixl", "none"] = "nixl"
    kv_role: KVRole | None = None
    """None: what the role says. NIXL ignores it, but for the metrics: `vllm:num_requests_kv_fetch_by_stage` is a consumer's."""
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    kv_lease_duration: float = 30.0
    heartbeat_interval: float = 5.0
    handshake_timeout: float = 5.0
    side_channel_host: str = "127.0.0.1"
    """What P's handles say, and where the engine listens; on loopback if this is no address of the machine."""
    side_channel_port: int = 0
    """0: any free port."""
    hardware: Hardware = Hardware()

    def __post_init__(self) -> None:
        """Refuse what vLLM would refuse, too."""
        for name in ("block_size", "num_gpu_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("kv_lease_duration", "heartbeat_interval", "handshake_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not self.model:
            raise ValueError("model must not be empty")
        if (self.num_gpu_blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(
                f"num_gpu_blocks = {self.num_gpu_blocks} blocks of {self.block_size} tokens hold less than one request"
                f" of max_model_len = {self.max_model_len}"
            )

    @property
    def is_kv_consumer(self) -> bool:
        """Whether vLLM would call this engine a consumer of KV."""
        role = self.kv_role or ("kv_consumer" if self.role == "decode" else "kv_producer")
        return self.connector == "nixl" and role != "kv_producer"
