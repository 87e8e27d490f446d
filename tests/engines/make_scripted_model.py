#!/usr/bin/env python3
"""Write a model that says what a script has: `make_scripted_model.py TINY_MODEL SCRIPT OUT_DIR`.

SCRIPT is a file of JSON: `answers` has the pieces of each answer by its mark, and `mark` is the
template that ends a prompt with one of the marks. Marks and pieces are tokens, so the next token is
a function of the last one. A piece that occurs twice is followed by the same piece.

Runs with the engines' own Python, as `make_model.py` does.
"""

import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from make_writing_model import save
from tokenizers import AddedToken
from transformers import AutoTokenizer

POSITIONS = 131_072


def template(tiny: str, mark: str) -> str:
    """Return the tiny model's template with the tools first, as most templates have them: what is
    before a new message is in an engine's cache. `mark` ends the prompt.
    """
    messages, tools, rest = tiny.partition("{%- if tools %}")
    listed, end, _ = rest.partition("{%- if add_generation_prompt %}")
    assert tools
    assert end
    begun = "{{- '<|im_start|>assistant\\n' }}"
    return "\n".join([tools + listed + messages + end, begun, mark, "{%- endif %}"])


def main(tiny: Path, script: Path, out: Path) -> None:
    """Write tokenizer, template, weights and generation config to `out`."""
    said = json.loads(script.read_text())
    answers: dict[str, list[str]] = said["answers"]
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    texts = dict.fromkeys([*answers, *itertools.chain(*answers.values())])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    tokenizer.chat_template = template(tokenizer.chat_template, said["mark"])
    tokenizer.model_max_length = POSITIONS
    follows: dict[int, int] = {}
    for mark, pieces in answers.items():
        ids = [tokenizer.convert_tokens_to_ids(text) for text in (mark, *pieces)]
        for last, token in itertools.pairwise([*ids, tokenizer.eos_token_id]):
            assert follows.setdefault(last, token) == token
    few = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    save(tiny, out, tokenizer, follows, **few, max_position_embeddings=POSITIONS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
