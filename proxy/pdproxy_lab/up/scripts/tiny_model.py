"""Writes a tiny Llama with random weights and a tokenizer of its own: `tiny_model.py FOLDER`.

Runs with vLLM's own interpreter (torch, transformers, tokenizers) and needs no network. Everything
comes from a fixed seed and the interpreter's standard library. The words that it makes mean
nothing; what carries them is real.
"""

import importlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN, LAYERS, POSITIONS, SEED = 4096, 256, 4, 4096, 1234
BOS, EOS, PAD, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] or [] %}{{- part['text'] }}{%- endfor %}{%- "
    "endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer() -> Any:
    """Return a byte-level BPE of the standard library's sources: text that every machine has."""
    tokenizers = importlib.import_module("tokenizers")
    level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD, IM_START, IM_END],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    sources = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer.train(sources, trainer)
    return tokenizer


def main(folder: Path) -> None:
    """Write tokenizer, template and weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=TEMPLATE,
        model_max_length=POSITIONS,
    ).save_pretrained(folder)
    specials = {
        f"{name}_token_id": tokenizer.token_to_id(f"<|{name}|>") for name in ("bos", "eos", "pad")
    }
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
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
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    model.config.dtype = torch.float32
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").write_text(json.dumps(specials) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
