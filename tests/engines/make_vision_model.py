#!/usr/bin/env python3
"""Write a tiny Qwen2-VL with random weights, an image processor and a chat template for pictures:
`make_vision_model.py TINY_MODEL OUT_DIR`.

A picture becomes a number of tokens that depends on its size, and the prompt ends in text. The
tokenizer is TINY_MODEL's (`make_model.py`), with the markers of pictures. Runs with the engines'
own Python and the overlay `vision`; no network.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import AddedToken
from transformers import (
    AutoTokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

HIDDEN, HEADS, LAYERS, POSITIONS, SEED = 256, 4, 4, 4096, 1234
VISION_WIDTH, VISION_HEADS, VISION_LAYERS = 64, 2, 2
PATCH, MERGE = 14, 2  # a token of the prompt stands for 28 by 28 pixels
TOKENS = (4, 64)  # per picture: smaller ones are enlarged, larger ones are reduced
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"


def template(text_template: str) -> str:
    """Return the chat template of the text model with a place for each picture among the parts."""
    part = "{{- part['text'] }}"
    assert text_template.count(part) == 1
    picture = START + IMAGE + END
    return text_template.replace(
        part,
        "{%- if part['type'] in ('image', 'image_url') %}\n{{- '" + picture + "' }}\n"
        "{%- else %}\n" + part + "\n{%- endif %}",
    )


def main(tiny: Path, out: Path) -> None:
    """Write tokenizer, template, processor, weights and generation config to `out`."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    markers = (START, END, IMAGE, VIDEO)
    tokenizer.add_tokens([AddedToken(marker, special=True) for marker in markers])
    vocabulary = tokenizer.get_vocab()
    start, end, image, video = (vocabulary[marker] for marker in markers)
    tokenizer.chat_template = template(tokenizer.chat_template)

    least, most = (tokens * (PATCH * MERGE) ** 2 for tokens in TOKENS)
    sizes: dict[str, Any] = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "size": {"shortest_edge": least, "longest_edge": most},
    }
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        video_processor=Qwen2VLVideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(out)

    specials = json.loads((tiny / "generation_config.json").read_text())
    torch.manual_seed(SEED)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS // 2,
            "max_position_embeddings": POSITIONS,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 12, 12],
            },
            **specials,
        },
        vision_config={
            "depth": VISION_LAYERS,
            "embed_dim": VISION_WIDTH,
            "hidden_size": HIDDEN,
            "num_heads": VISION_HEADS,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "initializer_range": 0.2,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    model = Qwen2VLForConditionalGeneration(config).to(torch.float32)
    model.config.dtype = torch.float32
    model.save_pretrained(out, safe_serialization=True)
    (out / "generation_config.json").write_text(json.dumps(specials) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
