"""Tokenizers as models have them, small and made on the spot: they differ in what may go wrong
where a text is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end|>x", "<|im_"]
WORDS = [
    "hello",
    " world",
    "\n",
    "  ",
    "é",
    "日本",
    "🦊",
    "ﬁ",
    "Ⅳ",
    "e\u0301",
    "a",
    " a",
    "1",
    "12",
    "'s",
    "<",
    "|im",
    "_end|>",
]
CORPUS = [
    " ".join(WORDS) * 3,
    "the quick brown fox jumps over the lazy dog " * 20,
    "def main(argv):\n    return 12\n" * 20,
]
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}{{- '[' + part.text + ']' }}{%- endfor %}{%- "
    "endif %}"
    "{%- for call in message.tool_calls or [] %}{{- call | tojson }}{%- endfor %}"
    "{%- if message.reasoning_content is defined %}{{- '<think>' + message.reasoning_content "
    "}}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}"
    "{%- for one in documents or [] %}{{- one.title }}{%- endfor %}"
    "{%- if effort is defined or enable_thinking is defined %}{{- 'thinking: ' ~ enable_thinking "
    "}}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def _trained(adjust: Callable[[Tokenizer], None], model: str = "bpe") -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram() if model == "unigram" else models.BPE(unk_token=None))
    adjust(tokenizer)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: trainers.Trainer
    if model == "unigram":
        trainer = trainers.UnigramTrainer(
            vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    else:
        trainer = trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _plain(name: str) -> AddedToken:
    return AddedToken(name, normalized=False, special=True)


def byte_level() -> Tokenizer:
    """As Llama 3 and Qwen: bytes, no normalizer, a token first."""

    def adjust(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()

    made = _trained(adjust)
    made.add_tokens([_plain(name) for name in SPECIALS] + [AddedToken("<think>", normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def prefix_space() -> Tokenizer:
    """A space before the first word, and a template with tokens on both sides."""

    def adjust(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)

    made = _trained(adjust)
    made.add_tokens([_plain(name) for name in SPECIALS])
    ids = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return made


def metaspace_first() -> Tokenizer:
    """As Llama 2 and Mistral: a mark before the first word of the text alone; a normalizer that
    joins characters.
    """

    def adjust(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")

    made = _trained(adjust)
    made.add_tokens([_plain(name) for name in SPECIALS] + [AddedToken("hello", normalized=True)])
    return made


def prepended() -> Tokenizer:
    """The older Llama way: the normalizer puts the mark before each stretch between two tokens."""

    def adjust(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )

    made = _trained(adjust)
    made.add_tokens([_plain(name) for name in SPECIALS] + [AddedToken("hello", normalized=True)])
    return made


def stripping() -> Tokenizer:
    """Tokens that take the white space around them, as some chat models have, and one that is white
    space.
    """

    def adjust(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    made = _trained(adjust)
    made.add_tokens(
        [
            AddedToken("<|im_start|>", normalized=False, special=True),
            AddedToken("<|im_end|>", normalized=False, special=True, rstrip=True),
            AddedToken("</s>", normalized=False, special=True, lstrip=True),
            AddedToken("<s>", normalized=False, special=True, lstrip=True, rstrip=True),
            AddedToken("  ", normalized=False),
            AddedToken("\n<", normalized=False),
        ]
    )
    return made


def words_alone() -> Tokenizer:
    """A token that counts only as a word of its own: nothing may be cut."""
    made = byte_level()
    made.add_tokens([AddedToken("world", normalized=False, single_word=True)])
    return made


def unigram() -> Tokenizer:
    """As T5 or Gemma's kind: the likeliest pieces rather than merges."""

    def adjust(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")

    made = _trained(adjust, "unigram")
    made.add_tokens([_plain(name) for name in SPECIALS])
    return made


KINDS = (byte_level, prefix_space, metaspace_first, prepended, stripping, words_alone, unigram)


@cache
def model(
    kind: Callable[[], Tokenizer], template: str | None = TEMPLATE
) -> PreTrainedTokenizerFast:
    """Such a tokenizer as transformers has it. Made once for all tests."""
    # a second, which each process that collects tests would take
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=kind(), chat_template=template, bos_token="<s>", eos_token="</s>"
    )


def folder(
    place: Path, kind: Callable[[], Tokenizer] = byte_level, template: str | None = TEMPLATE
) -> Path:
    """Write one to a folder."""
    model(kind, template).save_pretrained(place)
    return place
