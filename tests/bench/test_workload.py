"""A trace's lines, what a run sends, and the prompts: lengths, common beginnings, no secrets of the
caches.
"""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_lab.bench.arrivals import Arrivals
from pdproxy_lab.bench.prompts import Prompts, WordTokens, word_tokens
from pdproxy_lab.bench.trace import (
    BLOCK,
    TraceEntry,
    TraceError,
    cut,
    parse_trace,
    read_trace,
    spread,
)
from pdproxy_lab.bench.words import WORDS
from pdproxy_lab.bench.workload import (
    Lengths,
    Planned,
    RequestClass,
    classified,
    conversations,
    replayed,
    synthetic,
)

IDS = Lengths(300, 4000)
GOOD = '{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 5]}\n'


def read(text: str | bytes) -> list[TraceEntry]:
    return parse_trace("trace.jsonl", io.BytesIO(text.encode() if isinstance(text, str) else text))


def line(**fields: Any) -> str:
    return (
        json.dumps(
            {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]} | fields
        )
        + "\n"
    )


def test_a_trace_is_read() -> None:
    assert read(GOOD + "\n" + line(timestamp=3000.5, hash_ids=None)) == [
        TraceEntry(3.0, 700, 9, (0, 5)),
        TraceEntry(3.0005, 10, 1, None),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("\n\n", "no requests"),
        (GOOD + "{", "line 2"),
        (GOOD + "[]\n", "line 2"),
        (GOOD + line(timestamp=0), "line 2: timestamp 0 is before 3000"),
        (line(timestamp=-1), "line 1"),
        (line(timestamp="NaN"), "line 1"),
        (line(input_length=0), "line 1"),
        (line(output_length=0), "line 1"),
        (line(input_length=10**9), "line 1"),
        (line(input_length=1.5), "line 1"),
        (line(hash_ids=[1, 2]), "line 1: 10 tokens need 1 hash_ids of 512, got 2"),
        (line(hash_ids=[-1]), "line 1"),
        (line(hash_ids="ab"), "line 1"),
        (GOOD + "[" * 100_000, "line 2"),
        (b"\xff\xfe\n", "line 1"),
        (GOOD + '{"timestamp": 1' + " " * (1 << 20), "line 2: longer than"),
    ],
)
def test_a_wrong_trace_is_refused_in_one_line_with_its_number(text: str | bytes, says: str) -> None:
    with pytest.raises(TraceError) as error:
        read(text)
    assert says in str(error.value)
    assert str(error.value).startswith("trace.jsonl")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    says = ""
    try:
        read(content)
    except TraceError as error:
        says = str(error)
    assert "\n" not in says


def test_a_trace_is_not_read_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdproxy_lab.bench.trace.MAX_FILE", 3 * len(line()))
    assert len(read(3 * line())) == 3
    with pytest.raises(TraceError, match="line 4: the trace is larger than"):
        read(4 * line())


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none can't be read: No such file"):
        read_trace(tmp_path / "none")


def test_a_slice_begins_at_zero() -> None:
    entries = [TraceEntry(float(time), 1, 1) for time in range(10)]
    assert [entry.time for entry in cut(entries, 3, 6)] == [0, 1, 2]


def test_equal_times_are_spread_until_the_next_one() -> None:
    entries = [TraceEntry(float(time), 1, 1) for time in (0, 0, 0, 3, 3, 6)]
    assert [entry.time for entry in spread(entries)] == [0, 1, 2, 3, 4.5, 6]
    assert [entry.time for entry in spread([TraceEntry(0, 1, 1)] * 2)] == [0, 0]
    assert spread([]) == []


def test_a_replay_keeps_the_traces_order_and_scales_its_times() -> None:
    entries = [TraceEntry(float(time), 10 + time, 1 + time, (time,)) for time in range(10)]
    assert [one.at for one in replayed(entries, 0, scale=2)] == [time / 2 for time in range(10)]
    assert len(replayed(entries, 0, scale=2, duration=2)) == 4
    assert len(replayed(entries, 0, requests=3)) == 3
    by_rate = replayed(entries, 0, arrivals=Arrivals(kind="constant", rate=5), requests=4)
    assert [one.at for one in by_rate] == [0, 0.2, 0.4, pytest.approx(0.6)]
    assert [one.input_tokens for one in by_rate] == [10, 11, 12, 13]
    assert (
        len(replayed(entries, 0, arrivals=Arrivals(kind="constant", rate=100), duration=60)) == 10
    )


def test_lengths_are_drawn_from_their_range() -> None:
    alike = [RequestClass(inputs=Lengths(5, 9), outputs=Lengths(1, 1))]
    made = synthetic(Arrivals(rate=10), alike, 2, requests=200)
    assert {one.input_tokens for one in made} == {5, 6, 7, 8, 9}
    assert {one.output_tokens for one in made} == {1}
    assert made == synthetic(Arrivals(rate=10), alike, 2, requests=200)


def test_a_mix_has_each_class_by_its_share_with_its_own_lengths() -> None:
    chat = RequestClass(name="chat", share=3, inputs=Lengths(5, 9), outputs=Lengths(2, 2))
    document = RequestClass(name="document", share=1, inputs=Lengths(50, 50))
    made = synthetic(Arrivals(rate=10), [chat, document], 2, requests=2000)
    chats = [one for one in made if one.class_name == "chat"]
    assert 1400 < len(chats) < 1600
    assert {one.output_tokens for one in chats} == {2}
    assert {one.input_tokens for one in chats} == {5, 6, 7, 8, 9}
    others = {(one.class_name, one.input_tokens, one.output_tokens) for one in made} - {
        (one.class_name, one.input_tokens, one.output_tokens) for one in chats
    }
    assert others == {("document", 50, 128)}


def test_a_request_of_a_file_is_of_the_first_class_with_its_length() -> None:
    planned = [Planned(0.0, tokens, 1) for tokens in (1, 10, 11, 99)]
    short, rest = RequestClass(name="short", inputs=Lengths(1, 10)), RequestClass(name="rest")
    middle = RequestClass(name="middle", inputs=Lengths(10, 50))

    def names(*classes: RequestClass) -> list[str | None]:
        return [one.class_name for one in classified(planned, classes)]

    assert names(short, middle) == ["short", "short", "middle", None]
    assert names(short, rest) == ["short", "short", "rest", "rest"]


def test_conversations_differ_behind_what_most_prompts_begin_with() -> None:
    """Id 0 is a system prompt, 7 a block that is not full."""
    prompts: list[tuple[int, tuple[int, ...] | None]] = [
        (2 * BLOCK + 1, (0, 1, 7)),
        (3 * BLOCK, (0, 2, 3)),
        (3 * BLOCK + 5, (0, 1, 4, 7)),
        (BLOCK + 1, (0, 7)),
        (BLOCK + 2, (0, 8)),
        (2 * BLOCK, (2, 3)),
        (100, None),
    ]
    planned = [Planned(0.0, tokens, 1, ids) for tokens, ids in prompts]
    found = [one.conversation for one in conversations(planned)]
    assert found == [1, 2, 1, None, None, 2, None]


def test_a_conversation_has_a_name_that_another_run_has_not() -> None:
    first = Prompts("completions", "m", "salt", IDS, {})
    other = Prompts("completions", "m", "another", IDS, {})
    turn, single = Planned(0.0, 600, 1, (1, 2), conversation=1), Planned(0.0, 4, 1)
    name = first.conversation(0, turn)
    assert re.fullmatch("[0-9a-f]{16}", name)
    assert first.conversation(5, turn) == name != other.conversation(0, turn)
    names = {first.conversation(index, single) for index in range(3)}
    assert len(names - {name}) == 3


# -- prompts


def completion(prompts: Prompts, index: int, planned: Planned) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(prompts.body(index, planned))
    return body


@given(tokens=st.integers(1, 3000), output=st.integers(1, 500))
def test_a_completion_has_as_many_ids_as_asked(tokens: int, output: int) -> None:
    body = completion(
        Prompts("completions", "@", "s", IDS, {"temperature": 0}), 0, Planned(0, tokens, output)
    )
    assert len(body["prompt"]) == tokens
    assert all(300 <= one <= 4000 for one in body["prompt"])
    assert body["max_tokens"] == output
    assert (body["model"], body["stream"], body["ignore_eos"], body["temperature"]) == (
        "@",
        True,
        True,
        0,
    )
    assert body["stream_options"] == {"include_usage": True}


def test_a_chat_has_as_many_words_as_asked() -> None:
    body = completion(Prompts("chat", "m", "s", IDS, {}), 0, Planned(0, 70, 9))
    assert len(body["messages"][0]["content"].split(" ")) == 70
    assert body["max_completion_tokens"] == 9
    assert "prompt" not in body


@given(st.integers(0, 50), st.integers(100, 3000), st.integers(600, 20_000))
def test_two_chats_show_what_words_have(template: int, listed: int, tokens: int) -> None:
    """`listed`: the tokens of all words of the list. Prompts then have the tokens that are asked
    for, to half a word.
    """
    per_word = listed / len(WORDS)
    found = word_tokens(template + 1, template + 1 + listed)
    assert found.per_word == pytest.approx(per_word)
    assert (
        abs(found.template + found.per_word * found.words(tokens) - tokens) <= per_word / 2 + 1e-6
    )
    assert abs(found.template - template) <= abs(1 - per_word) + 1e-6


@pytest.mark.parametrize("counted", [(0, 0), (1000, 900), (10, 100_000)])
def test_counts_that_no_tokenizer_makes_are_not_believed(counted: tuple[int, int]) -> None:
    assert word_tokens(*counted) == WordTokens(0.0, 1.0)


def test_a_chat_has_the_tokens_that_were_asked_for() -> None:
    """Also where a word is several tokens; common beginnings stay common."""
    prompts = Prompts("chat", "m", "s", IDS, {}, WordTokens(10.0, 2.0))
    assert (
        len(completion(prompts, 0, Planned(0, 110, 9))["messages"][0]["content"].split(" ")) == 50
    )
    one, other = (
        completion(prompts, place, Planned(0, 2 * BLOCK, 1, (7, 3 + place)))["messages"][0][
            "content"
        ].split(" ")
        for place in range(2)
    )
    assert len(one) == len(other) == BLOCK - 5
    assert one[: BLOCK // 2] == other[: BLOCK // 2]
    assert one[BLOCK // 2 :] != other[BLOCK // 2 :]


def test_prompts_with_the_same_hash_ids_have_the_same_beginning() -> None:
    prompts = Prompts("completions", "m", "s", IDS, {})
    one = completion(prompts, 0, Planned(0, 2 * BLOCK + 5, 1, (7, 8, 9)))["prompt"]
    other = completion(prompts, 1, Planned(0, 2 * BLOCK, 1, (7, 3)))["prompt"]
    longer = completion(prompts, 2, Planned(0, 3 * BLOCK, 1, (7, 8, 9)))["prompt"]
    assert (len(one), len(other), len(longer)) == (2 * BLOCK + 5, 2 * BLOCK, 3 * BLOCK)
    assert one[:BLOCK] == other[:BLOCK]
    assert one[BLOCK : 2 * BLOCK] != other[BLOCK:]
    assert longer[: len(one)] == one


def test_a_block_that_was_dropped_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdproxy_lab.bench.prompts._KEPT_BLOCKS", 2)
    prompts = Prompts("completions", "m", "s", IDS, {})
    first = completion(prompts, 0, Planned(0, BLOCK, 1, (1,)))
    for number in range(2, 6):
        prompts.body(0, Planned(0, BLOCK, 1, (number,)))
    assert len(prompts._blocks) == 2
    assert completion(prompts, 9, Planned(0, BLOCK, 1, (1,))) == first


def test_unique_prompts_have_no_common_beginning_and_another_salt_makes_others() -> None:
    one, other = (
        Prompts("completions", "m", "a", IDS, {}),
        Prompts("completions", "m", "b", IDS, {}),
    )
    planned = Planned(0, 40, 1)
    made = {one.body(0, planned), one.body(1, planned), other.body(0, planned)}
    assert len(made) == 3
    assert one.body(0, planned) in made
