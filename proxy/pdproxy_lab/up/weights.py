"""The bytes of a model's weights, estimated from its config.json: for a model whose weights are not
on this machine yet. Pure.

The formulas are those of decoder-only transformers with gated MLPs, dense or with experts. What is
small is left out: norms, biases, rotary tables. So the estimate is at most a few percent wrong,
mostly too low. Other architectures are not estimated, nor are models that also read pictures or
sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_KNOWN = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "granite", "olmo2", "olmo3"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "cohere", "cohere2", "smollm3", "seed_oss"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe", "granitemoe", "olmoe"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2"),
)
_TIED = ("gemma", "gemma2", "gemma3_text", "cohere", "cohere2")
"""Those whose output layer is their embedding, if config.json does not say it."""
_PLAIN_BITS = 16
"""Of a weight that is not quantized: vLLM takes 16 also where the file has 32."""
_SCALE_BITS = 20
"""Of a group's scale and zero point."""
_METHODS: Mapping[str, float] = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4.25, "bitsandbytes": 4.5}
_ALGORITHMS: Mapping[str, float] = {"FP8": 8, "NVFP4": 4.5}


class Config(msgspec.Struct):
    """What is read of config.json."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool | None = None
    quantization_config: dict[str, Any] | None = None

    # experts, by the names that architectures have for them
    num_experts: int = 0
    num_local_experts: int = 0
    n_routed_experts: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []

    # latent attention
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0


def estimate(config: bytes) -> int | None:
    """Return the bytes of the weights. `config`: the text of config.json. None: they can't be
    estimated.
    """
    try:
        read = msgspec.json.decode(config, type=Config)
    except msgspec.MsgspecError:
        return None
    if read.model_type not in _KNOWN or read.num_attention_heads < 1:
        return None
    found = _bytes(read)
    return found if found is not None and found > 0 else None


def _bytes(config: Config) -> int | None:
    layers, hidden = config.num_hidden_layers, config.hidden_size
    experts = config.n_routed_experts or config.num_experts or config.num_local_experts
    dense = layers if not experts else _dense_layers(config)
    width = config.moe_intermediate_size or config.intermediate_size
    shared = config.shared_expert_intermediate_size + (config.n_shared_experts or 0) * width
    in_experts = (layers - dense) * experts * _mlp(hidden, width)
    others = layers * _attention(config)
    others += dense * _mlp(hidden, config.intermediate_size)
    others += (layers - dense) * (_mlp(hidden, shared) + hidden * experts)
    tied = config.tie_word_embeddings
    if tied is None:
        tied = config.model_type in _TIED
    plain = config.vocab_size * hidden * (1 if tied else 2)

    bits = _bits(config.quantization_config)
    if bits is None:
        return None
    method = (config.quantization_config or {}).get("quant_method")
    other_bits = _PLAIN_BITS if method == "mxfp4" else bits
    return int(in_experts * bits + others * other_bits + plain * _PLAIN_BITS) // 8


def _dense_layers(config: Config) -> int:
    """Return how many layers have no experts."""
    step = max(1, config.decoder_sparse_step)
    return sum(
        number < config.first_k_dense_replace
        or number in config.mlp_only_layers
        or (number + 1) % step != 0
        for number in range(min(config.num_hidden_layers, 10_000))
    )


def _mlp(hidden: int, width: int) -> int:
    return 3 * hidden * width


def _attention(config: Config) -> int:
    """Return the weights of one layer's attention."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.kv_lora_rank is not None:
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        query = heads * (config.qk_nope_head_dim + rope)
        queries = hidden * query
        if config.q_lora_rank is not None:
            queries = config.q_lora_rank * (hidden + query)
        keys = hidden * (rank + rope) + rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        return queries + keys + heads * config.v_head_dim * hidden
    dim = config.head_dim or hidden // heads
    key_heads = config.num_key_value_heads or heads
    return 2 * hidden * dim * (heads + key_heads)


def _bits(quantization: Mapping[str, Any] | None) -> float | None:
    """Return the bits of a quantized weight with its part of a scale; None: not known."""
    if quantization is None:
        return _PLAIN_BITS
    found = _METHODS.get(str(quantization.get("quant_method")))
    if found is None:
        found = _ALGORITHMS.get(str(quantization.get("quant_algo")))
    if found is not None:
        return found
    groups = quantization.get("config_groups")
    weights = quantization
    if isinstance(groups, dict) and groups:
        weights = next(iter(groups.values())).get("weights") or {}
    bits, group = weights.get("bits") or weights.get("num_bits"), weights.get("group_size")
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        return None
    return bits + (_SCALE_BITS / group if isinstance(group, int) and group > 0 else 0)
