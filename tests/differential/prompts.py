"""Prompts and conversations of a generated request: of every length that matters, and some that are
none.
"""

from __future__ import annotations

from hypothesis import strategies as st

from tests.differential.dialect import Dialect
from tests.differential.fields import Fields

SENTENCE = "The harbour master kept two ledgers, one for what came in and one for what left. "
TEXTS = (
    "a",
    "Où ça? 在哪里? 🚢",
    "import os\n",
    '{"a": [1, 2]}',
    SENTENCE,
    "  \n",
    "<|im_end|>",
    "e\u0301\ufffd",
)


def _lengths(dialect: Dialect) -> st.SearchStrategy[int]:
    block, longest = dialect.block_size, dialect.max_model_len
    edges = (
        1,
        block - 1,
        block,
        block + 1,
        2 * block,
        3 * block + 1,
        dialect.long_prompt,
        longest - 1,
        longest,
        longest + 1,
    )
    return st.one_of(st.integers(1, 5 * block), st.sampled_from(edges))


def _ids(
    dialect: Dialect, lengths: st.SearchStrategy[int] | None = None
) -> st.SearchStrategy[list[int]]:
    low, high = dialect.ids

    def spread(drawn: tuple[int, int]) -> list[int]:
        length, seed = drawn
        return [low + (seed + at * at * 7 + at * 13) % (high - low) for at in range(length)]

    return st.tuples(_lengths(dialect) if lengths is None else lengths, st.integers(0, 500)).map(
        spread
    )


def _text() -> st.SearchStrategy[str]:
    long = st.tuples(st.integers(0, 999), st.integers(1, 8)).map(
        lambda drawn: f"{drawn[0]} {SENTENCE * drawn[1]}"
    )
    return st.one_of(long, st.lists(st.sampled_from(TEXTS), max_size=4).map("".join))


def prompts(dialect: Dialect) -> Fields:
    few = st.integers(1, 3 * dialect.block_size)
    one = st.one_of(_text(), _ids(dialect))
    several = st.one_of(
        st.lists(_text(), min_size=1, max_size=4),
        st.lists(_ids(dialect, few), min_size=1, max_size=4),
    )
    return st.one_of(one, one, several).map(lambda prompt: {"prompt": prompt})


def messages(dialect: Dialect) -> Fields:
    content = st.one_of(
        _text(),
        st.lists(_text().map(lambda text: {"type": "text", "text": text}), max_size=3),
    )
    said = st.tuples(st.sampled_from(("user", "assistant", "system", "tool")), content)
    turn = said.map(lambda drawn: {"role": drawn[0], "content": drawn[1]})
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "forecast", "arguments": '{"city": "Oslo", "days": 2}'},
    }
    odd = st.sampled_from(
        (
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
            {"role": "user", "content": None},
            {"role": "user"},
            {"role": "user", "content": "a", "name": "Ada"},
            {"content": "a"},
            {"role": 5, "content": "a"},
            {"role": "user", "content": 5},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
                ],
            },
        )
    )
    plain = st.lists(turn, min_size=1, max_size=4)
    strange = st.tuples(plain, odd).map(lambda drawn: [*drawn[0], drawn[1]])
    return st.one_of(plain, plain, plain, plain, strange).map(lambda found: {"messages": found})


def headers() -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    known = (
        ("x-request-id", "chosen"),
        ("content-type", "application/json; charset=utf-8"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    )
    return st.one_of(st.just(()), st.just(()), st.sampled_from(known).map(lambda one: (one,)))
