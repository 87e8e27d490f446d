#!/usr/bin/env python3
"""Write a tiny Llama with random weights, a byte-level BPE tokenizer and a chat template:
`make_model.py OUT_DIR`.

Runs with the engines' own Python (torch, transformers, tokenizers; no network). Everything comes
from a fixed seed and the interpreter's standard library, so two builds hold the same bits and an
answer recorded once stays valid. The wide initializer makes the logits peaky: a greedy answer then
doesn't hang on the last bit of a sum.
"""

import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, HIDDEN, LAYERS, POSITIONS, SEED = 4096, 256, 4, 4096, 1234
BOS, EOS, PAD, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
THINK = [
    "<think>",
    "</think>",
]  # one token each, as reasoning parsers want them; no special ones, so that text shows them


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of the standard library's sources, which every interpreter of one version
    shares.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(THINK),
        special_tokens=[BOS, EOS, PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(
        sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), trainer
    )
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in THINK])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def main(out: Path) -> None:
    """Write tokenizer, template, weights and generation config to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=Path(__file__).with_name("chat_template.jinja").read_text(),
        model_max_length=POSITIONS,
    ).save_pretrained(out)

    specials: dict[str, Any] = {
        f"{name}_token_id": tokenizer.token_to_id(f"<|{name}|>") for name in ("bos", "eos", "pad")
    }
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.2,
        **specials,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    model.config.dtype = torch.float32
    model.save_pretrained(out, safe_serialization=True)
    (out / "generation_config.json").write_text(json.dumps(specials) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
