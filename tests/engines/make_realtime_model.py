#!/usr/bin/env python3
"""Write a tiny Qwen3-ASR for live speech, without weights: `make_realtime_model.py TINY_MODEL
OUT_DIR`.

Engines load it with `--load-format dummy`, which makes weights from a fixed seed. The tokenizer is
TINY_MODEL's (`make_model.py`), with the markers of audio. Runs with the engines' own Python; no
network.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import AutoTokenizer
from transformers.models.qwen3_asr import Qwen3ASRFeatureExtractor, Qwen3ASRProcessor

HIDDEN, HEADS, LAYERS, POSITIONS = 256, 4, 2, 4096
AUDIO_WIDTH, AUDIO_HEADS, AUDIO_LAYERS = 64, 2, 1
MARKERS = START, END, PAD = "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"


def main(tiny: Path, out: Path) -> None:
    """Write tokenizer, processor and configuration to `out`."""
    names = "audio_bos_token", "audio_eos_token", "audio_token"
    tokenizer = AutoTokenizer.from_pretrained(
        tiny, extra_special_tokens=dict(zip(names, MARKERS, strict=True))
    )
    vocabulary = tokenizer.get_vocab()
    processor = Qwen3ASRProcessor(
        feature_extractor=Qwen3ASRFeatureExtractor(),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(out)
    specials = json.loads((tiny / "generation_config.json").read_text())
    config = {
        "architectures": ["Qwen3ASRRealtimeGeneration"],
        "model_type": "qwen3_asr",
        "dtype": "float32",
        "thinker_config": {
            "model_type": "qwen3_asr_thinker",
            "audio_token_id": vocabulary[PAD],
            "audio_start_token_id": vocabulary[START],
            "audio_end_token_id": vocabulary[END],
            "audio_config": {
                "model_type": "qwen3_asr_audio_encoder",
                "encoder_layers": AUDIO_LAYERS,
                "encoder_attention_heads": AUDIO_HEADS,
                "encoder_ffn_dim": 2 * AUDIO_WIDTH,
                "d_model": AUDIO_WIDTH,
                "downsample_hidden_size": AUDIO_WIDTH,
                "n_window": 50,
                "n_window_infer": 800,
                "output_dim": HIDDEN,
            },
            "text_config": {
                "model_type": "qwen3_asr_text",
                "vocab_size": len(tokenizer),
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS // 2,
                "head_dim": HIDDEN // HEADS,
                "max_position_embeddings": POSITIONS,
                "rope_theta": 10000.0,
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_interleaved": True,
                    "mrope_section": [12, 10, 10],
                },
                **specials,
            },
        },
        **specials,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(specials) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
