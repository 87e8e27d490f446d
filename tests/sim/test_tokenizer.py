"""The simulator's tokenizer: what is encoded is decoded, in no more tokens than bytes, with special
tokens by name.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_lab.sim.tokenizer import (
    BOS,
    FIRST_BYTE,
    IM_END,
    IM_START,
    SPECIAL,
    THINK,
    VOCABULARY,
    BuiltInTokenizer,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_what_is_encoded_is_decoded(text):
    tokenizer = BuiltInTokenizer()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(TEXT)
def test_a_text_never_takes_more_tokens_than_bytes(text):
    assert len(BuiltInTokenizer().encode(text)) <= len(text.encode())


def test_frequent_words_are_one_token():
    ids = BuiltInTokenizer().encode("def main( the river")
    assert [VOCABULARY[token] for token in ids] == [b"def", b" main", b"(", b" the", b" river"]


def test_a_character_of_several_bytes_is_several_tokens():
    assert BuiltInTokenizer().encode("é") == [FIRST_BYTE + 0xC3, FIRST_BYTE + 0xA9]
    assert BuiltInTokenizer().decode([FIRST_BYTE + 0xC3]) == "\ufffd"


def test_special_tokens_by_name_and_left_out_of_texts():
    tokenizer = BuiltInTokenizer()
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (IM_START, IM_END)
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"
    assert [token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)] == list(
        range(THINK)
    )


def test_marks_of_thinking_and_of_calls_are_text():
    tokenizer = BuiltInTokenizer()
    text = "".join(SPECIAL[THINK:])
    assert len(tokenizer.encode(text)) == 4
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_first_token_is_added_only_where_asked_for():
    assert BuiltInTokenizer(add_bos=True).encode("hi")[0] == BOS
    assert BOS not in BuiltInTokenizer(add_bos=True).encode("hi", add_special_tokens=False)
    assert BOS not in BuiltInTokenizer().encode("hi")


def test_no_two_tokens_are_the_same_bytes():
    # Single bytes of letters and their one-letter words would be.
    assert len(set(VOCABULARY)) == len(VOCABULARY)


@pytest.mark.parametrize("word", ["x" * 100_000, " " * 100_000, "ab1" * 30_000])
def test_long_words_take_no_time_that_grows_faster_than_they_do(word):
    tokenizer = BuiltInTokenizer()
    assert tokenizer.decode(tokenizer.encode(word)) == word
