"""Reads prompts in ShareGPT's form, as vLLM's serving benchmark does: of each conversation the
first question, and the length of its answer.

The file is a JSON list of `{"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt",
"value": TEXT}, ...]}`. There is no tokenizer here: `BYTES_PER_TOKEN` bytes of UTF-8 are taken for a
token, about what English has. What prompts really have is what the server counts. Source:
vllm/benchmarks/datasets.py (ShareGPTDataset); https://huggingface.co/datasets/
anon8231489123/ShareGPT_Vicuna_unfiltered.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdproxy_lab.bench.arrivals import Arrivals
from pdproxy_lab.bench.workload import Planned

BYTES_PER_TOKEN = 4
MAX_FILE = 1 << 30
"""Bytes. The public file has 0.65 GB."""
MAX_CONVERSATIONS = 1_000_000
MAX_CONVERSATION = 4 << 20
"""Bytes. A longer one is left out."""
_ASKING = frozenset({"human", "user"})


class ShareGptError(ValueError):
    """What is wrong with a file, in one line."""


class Question(msgspec.Struct, frozen=True):
    """A prompt, and how many tokens both have, estimated."""

    text: str
    input_tokens: int
    output_tokens: int


class _Conversation(msgspec.Struct):
    conversations: msgspec.Raw
    """Decoded one by one: all turns of a large file at once would take several times its size."""


class _Turn(msgspec.Struct, rename={"role": "from"}):
    role: str
    value: str


def read_sharegpt(path: Path, max_tokens: float = math.inf) -> tuple[list[Question], int]:
    """Read a file. Returns its questions, and how many conversations were left out: they begin with
    no question and answer, or have more than `max_tokens` in both.

    Raises:
        ShareGptError: it can't be read, is something else, is too large, or has no question.
    """
    name = path.name
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ShareGptError(f"{name} can't be read: {error.strerror}") from None
    if len(content) > MAX_FILE:
        raise ShareGptError(f"{name} is larger than {MAX_FILE} bytes")
    if content.count(b'"conversations"') > MAX_CONVERSATIONS:
        raise ShareGptError(f"{name} has more than {MAX_CONVERSATIONS} conversations")
    try:
        found = msgspec.json.decode(content, type=list[_Conversation])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ShareGptError(f"{name} is no list of conversations: {_line(error)}") from None
    questions = []
    for number, one in enumerate(found, 1):
        try:
            question = _first(one.conversations)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ShareGptError(f"{name}, conversation {number}: {_line(error)}") from None
        if question and question.input_tokens + question.output_tokens <= max_tokens:
            questions.append(question)
    if not questions:
        raise ShareGptError(f"{name}: none of {len(found)} conversations can be used")
    return questions, len(found) - len(questions)


def asked(
    questions: Sequence[Question],
    arrivals: Arrivals,
    seed: int,
    *,
    duration: float | None = None,
    requests: int | None = None,
) -> list[Planned]:
    """Return requests with the questions in a random order, each as often as the others, or once
    more.

    Raises:
        ValueError: they are too many.
    """
    order = list(questions)
    random.Random(f"{seed}:sharegpt").shuffle(order)
    return [
        Planned(time, one.input_tokens, one.output_tokens, text=one.text)
        for number, time in enumerate(arrivals.times(seed, duration=duration, requests=requests))
        for one in (order[number % len(order)],)
    ]


def _first(raw: msgspec.Raw) -> Question | None:
    """Return a conversation's first question. None: it has none with an answer, or is too long."""
    if len(memoryview(raw)) > MAX_CONVERSATION:
        return None
    turns = msgspec.json.decode(raw, type=list[_Turn])
    if turns and turns[0].role not in _ASKING:  # an answer whose question was cut off
        del turns[0]
    if len(turns) < 2 or turns[0].role not in _ASKING or turns[1].role in _ASKING:
        return None
    texts = turns[0].value.strip(), turns[1].value.strip()
    if not all(texts):
        return None
    prompt, answer = (math.ceil(len(text.encode()) / BYTES_PER_TOKEN) for text in texts)
    return Question(texts[0], prompt, answer)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
