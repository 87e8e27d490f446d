#!/usr/bin/env python3
"""Write a model that calls a tool whatever it is asked: `make_writing_model.py TINY_MODEL OUT_DIR`.

The call has one argument of 3 kB. Each of its tokens occurs once, so the next token is a function
of the last one.

Runs with the engines' own Python, as `make_model.py` does.
"""

import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

BEGIN, CALL, END_OF_CALL, END = (
    "<tool_call>",
    "\n<function=write_file>\n<parameter=content>\n",
    "\n</parameter>\n</function>\n",
    "</tool_call>",
)
BYTES = 3000
LOGIT = 4.0
LAYERS = 24
"""So many that a call takes several seconds: 0.3 ms each for a token."""


def main(tiny: Path, out: Path) -> None:
    """Write tokenizer, template, weights and generation config to `out`."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text in (BEGIN, CALL, END_OF_CALL, END)
        ]
    )
    begin, call, end_of_call, end = (
        tokenizer.convert_tokens_to_ids(text) for text in (BEGIN, CALL, END_OF_CALL, END)
    )
    (before,) = tokenizer("\n", add_special_tokens=False)["input_ids"]  # the end of every prompt
    written: list[int] = []
    size = 0
    for token in range(tokenizer.vocab_size):
        text = str(tokenizer.decode([token]))
        if size < BYTES and text.isascii() and text.strip().isalpha() and 2 <= len(text) <= 4:
            written.append(token)
            size += len(text)
    said = [before, begin, call, *written, end_of_call, end, tokenizer.eos_token_id]
    assert size >= BYTES
    assert len(set(said)) == len(said)

    save(tiny, out, tokenizer, dict(itertools.pairwise(said)), num_hidden_layers=LAYERS)
    (out / "said.json").write_text(
        json.dumps({"content": tokenizer.decode(written), "tokens": len(said) - 1})
    )


def save(
    tiny: Path,
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    follows: dict[int, int],
    **changes: int,
) -> None:
    """Write a model that writes `follows[token]` behind `token`. `changes`: to the config of
    `tiny`.

    Attention and layers add nothing but time: a token has the vector that the head has for the
    token that follows.
    """
    config = AutoConfig.from_pretrained(tiny, **changes)
    config.vocab_size = len(tokenizer)
    torch.manual_seed(1234)
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        vectors = torch.nn.functional.normalize(
            torch.randn(len(tokenizer), config.hidden_size), dim=1
        )
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings.copy_(vectors)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head.zero_()
        for last, token in follows.items():
            embeddings[last] = vectors[token]
            head[token] = LOGIT * vectors[token]
    model.config.dtype = torch.float32
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    (out / "generation_config.json").write_text((tiny / "generation_config.json").read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
