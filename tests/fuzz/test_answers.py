"""Engines' answers: recorded ones at every cut, mutated ones, several, none."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.answers import check_answer, check_engine_json
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import recorded_answers, recorded_bodies

ANSWERS = {name: answer for name, answer in recorded_answers().items() if len(answer) < 4000}
BODIES = {
    name: answer.partition(b"\r\n\r\n")[2] for name, answer in ANSWERS.items()
} | recorded_bodies()
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    "name", [name for name in ANSWERS if name.startswith(("agg_c", "pd0", "err_chat_b"))]
)
async def test_a_recorded_answer_at_every_cut(name: str) -> None:
    """Cut in two at each byte, an answer is heard the same."""
    for at in range(len(ANSWERS[name])):
        await check_answer(ANSWERS[name], [at])


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(ANSWERS)).map(ANSWERS.__getitem__).flatmap(mutated),
    st.lists(st.integers(0, 4000), max_size=4),
)
@example(b"HTTP/1.1 103 Early\r\ncontent-length: 3\r\n\r\nabc" + OK, [])
@example(OK + OK, [])
@example(OK + b"garbage", [])
@example(b"HTTP/1.1 200 OK\r\n\r\nuntil the end", [20])
@example(b"HTTP/1.1 100 Continue\r\n\r\n" + OK, [10])
def test_mutated_answers(data: bytes, cuts: list[int]) -> None:
    """One end, in order, whatever comes."""
    asyncio.run(check_answer(data, cuts))


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from(sorted(BODIES)).map(BODIES.__getitem__).flatmap(mutated),
    )
)
@example(b"[" * 5000)
@example(b'{"error":' * 5000)
@example(b'{"kv_transfer_params":' + b"[" * 5000)
@example(b'{"usage":{"prompt_tokens":1e999}}')
@example(b'{"error":{"message":"x","type":"y","z":"\xff"}}\n')
def test_mutated_bodies(body: bytes) -> None:
    """What engines say in JSON is read or is not; nothing escapes."""
    check_engine_json(body)
