"""Conversations in ShareGPT's form: which questions are asked, what is left out, hostile files."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdproxy.cli.main import main
from pdproxy_lab.bench import sharegpt
from pdproxy_lab.bench.arrivals import Arrivals
from pdproxy_lab.bench.prompts import Prompts
from pdproxy_lab.bench.sharegpt import Question, ShareGptError, asked, read_sharegpt
from pdproxy_lab.bench.workload import Lengths, Planned
from tests.bench.servers import FAST, engines


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}


def file(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "chats.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_the_first_question_and_the_length_of_its_answer_are_taken(tmp_path: Path) -> None:
    chats = [
        conversation(("human", " Why? "), ("gpt", "x" * 40), ("human", "And?"), ("gpt", "y")),
        conversation(("gpt", "cut off"), ("user", "grün"), ("gpt", "z")),
        conversation(("human", "no answer")),
        conversation(("human", "two"), ("human", "questions")),
        conversation(("human", " "), ("gpt", "to nothing")),
        conversation(("human", "long"), ("gpt", "x" * 4000)),
        conversation(),
    ]
    assert read_sharegpt(file(tmp_path, chats), 100) == (
        [Question("Why?", 1, 10), Question("grün", 2, 1)],
        5,
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no list of conversations"),
        (b"{}", "is no list of conversations"),
        (b"[1]", "is no list of conversations"),
        (b"[" * 100_000, "is no list of conversations"),
        (b"\xff", "is no list of conversations"),
        ([{"id": "x"}], "missing required field `conversations`"),
        (b"[]", "none of 0 conversations can be used"),
        ([conversation(("human", "alone"))], "none of 1 conversations can be used"),
        ([conversation(("human", "a"), ("gpt", "b")), {"conversations": 5}], "conversation 2: "),
        ([{"conversations": [{"from": "human", "value": 5}]}], "conversation 1: "),
        (b'[{"conversations": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]", "conversation"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: object, says: str) -> None:
    with pytest.raises(ShareGptError) as error:
        read_sharegpt(file(tmp_path, content))
    assert says in str(error.value)
    assert str(error.value).startswith("chats.json")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_file_is_not_read_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = conversation(("human", "a"), ("gpt", "b"))
    path = file(tmp_path, [one, one])
    monkeypatch.setattr(sharegpt, "MAX_CONVERSATIONS", 1)
    with pytest.raises(ShareGptError, match="more than 1 conversations"):
        read_sharegpt(path)
    monkeypatch.setattr(sharegpt, "MAX_FILE", 100)
    with pytest.raises(ShareGptError, match="larger than 100 bytes"):
        read_sharegpt(path)
    monkeypatch.undo()
    monkeypatch.setattr(sharegpt, "MAX_CONVERSATION", 60)
    with pytest.raises(ShareGptError, match="none of 2 conversations"):
        read_sharegpt(path)


def test_a_seed_gives_an_order_in_which_each_question_comes_equally_often() -> None:
    questions = [Question(str(number), 1, 1) for number in range(5)]
    arrivals = Arrivals(kind="constant", rate=1)
    one, again, other = (asked(questions, arrivals, seed, requests=12) for seed in (1, 1, 2))
    assert one == again
    assert [planned.text for planned in one] != [planned.text for planned in other]
    counts = [sum(planned.text == one.text for planned in other) for one in questions]
    assert sorted(counts) == [2, 2, 2, 3, 3]


def test_a_question_is_sent_as_it_is_behind_a_beginning_that_no_cache_has() -> None:
    planned = Planned(0.0, 3, 7, text='"Why @?"\n')
    for endpoint in ("completions", "chat"):
        texts = []
        for salt, index in (("s", 0), ("s", 1), ("t", 0)):
            prompts = Prompts(endpoint, "m", salt, Lengths(1, 9), {})
            body = json.loads(prompts.body(index, planned))
            found = body["prompt"] if endpoint == "completions" else body["messages"][0]["content"]
            texts.append(found.partition(" "))
        assert {rest for _, _, rest in texts} == {planned.text}
        assert len({first for first, _, _ in texts}) == 3


def test_questions_are_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = [conversation(("human", f"Question {n}?"), ("gpt", "a" * 20)) for n in range(4)]
    path, out = file(tmp_path, [*chats, conversation()]), tmp_path / "out.jsonl"
    load = ["--rate", "200", "--requests", "8", "--seeds", "1", "--allow-lag", "--warm-up", "0"]
    with engines(FAST) as (engine,):
        words = ["bench", engine.url, "--sharegpt", str(path), *load, "--json", str(out)]
        assert main(words) == 0
        sent = [request.json["prompt"].partition(" ")[2] for request in engine.requests]
    assert sorted(sent) == sorted(2 * [f"Question {n}?" for n in range(4)])
    made = json.loads(out.read_text())
    assert made["total_output_tokens"] == 8 * 5
    assert made["pdproxy"]["trace"] == "chats.json"
    shown = capsys.readouterr().out
    assert "1 requests of chats.json were left out" in shown
    assert "times the tokens that were asked for" not in shown
