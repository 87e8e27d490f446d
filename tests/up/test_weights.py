"""The bytes of known models' weights, from their config.json alone."""

import json
from typing import Any

import pytest

from pdproxy_lab.up.weights import estimate

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
QWEN2_72B = {**LLAMA_70B, "model_type": "qwen2", "intermediate_size": 29568, "vocab_size": 152064}
INT4 = {"num_bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("config", "gigabytes"),
    [
        # Llama 3.1 70B, and in 8 bits
        (LLAMA_70B, 141.1),
        ({**LLAMA_70B, "quantization_config": {"quant_method": "fp8"}}, 72.7),
        # Qwen2.5 72B, by AWQ and by compressed-tensors
        (
            {
                **QWEN2_72B,
                "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
            },
            41.6,
        ),
        (
            {
                **QWEN2_72B,
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": INT4}},
                },
            },
            41.6,
        ),
        # Qwen3 8B
        (
            {
                "model_type": "qwen3",
                "hidden_size": 4096,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 12288,
                "vocab_size": 151936,
                "tie_word_embeddings": False,
            },
            16.4,
        ),
        # Gemma 2 9B, which does not say that its output layer is its embedding
        (
            {
                "model_type": "gemma2",
                "hidden_size": 3584,
                "num_hidden_layers": 42,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 256,
                "intermediate_size": 14336,
                "vocab_size": 256000,
            },
            18.5,
        ),
        # Mixtral 8x7B
        (
            {
                "model_type": "mixtral",
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 32000,
                "num_local_experts": 8,
            },
            93.4,
        ),
        # Qwen3 30B-A3B
        (
            {
                "model_type": "qwen3_moe",
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "vocab_size": 151936,
                "tie_word_embeddings": False,
            },
            61.1,
        ),
        # gpt-oss-20b: only its experts are quantized
        (
            {
                "model_type": "gpt_oss",
                "hidden_size": 2880,
                "num_hidden_layers": 24,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "intermediate_size": 2880,
                "num_local_experts": 32,
                "vocab_size": 201088,
                "quantization_config": {"quant_method": "mxfp4"},
            },
            13.8,
        ),
        # DeepSeek V3 in 16 bits: 671 billion parameters
        (
            {
                "model_type": "deepseek_v3",
                "hidden_size": 7168,
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "num_key_value_heads": 128,
                "intermediate_size": 18432,
                "moe_intermediate_size": 2048,
                "n_routed_experts": 256,
                "n_shared_experts": 1,
                "first_k_dense_replace": 3,
                "vocab_size": 129280,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            1342.1,
        ),
        # DeepSeek V2 Lite
        (
            {
                "model_type": "deepseek_v2",
                "hidden_size": 2048,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "intermediate_size": 10944,
                "moe_intermediate_size": 1408,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
                "vocab_size": 102400,
                "q_lora_rank": None,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            31.41,
        ),
    ],
)
def test_estimates_of_known_models(config: dict[str, Any], gigabytes: float) -> None:
    found = estimate(json.dumps(config).encode())
    assert found is not None
    assert found / 1e9 == pytest.approx(gigabytes, rel=0.004)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mamba"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": "many"},
        {"hidden_size": -8192, "vocab_size": 0},
        {"quantization_config": {"quant_method": "new"}},
        {"quantization_config": {"bits": "4"}},
        {"quantization_config": {"config_groups": {"group_0": {"weights": None}}}},
    ],
)
def test_what_is_not_known_is_not_estimated(changes: dict[str, Any]) -> None:
    assert estimate(json.dumps({**LLAMA_70B, **changes}).encode()) is None
    assert estimate(b"[") is None
