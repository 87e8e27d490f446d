"""Token ids made at the proxy are the engines': of every shape of the equality suite, and at work.

A plain engine says in its answers which ids it served; the same body is tokenized here. Then a proxy with `--tokenize always`
answers shapes as the plain engine does, while P and D get ids in place of texts.
"""

import json
import os
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdproxy.tokens.canaries import CANARIES, Agreement, Answer, compare
from pdproxy.tokens.errors import UnsureError
from pdproxy.tokens.ids import TokenIds, from_numbers
from pdproxy.tokens.tokenize_request import tokenize_body
from pdproxy.tokens.tokenizer import Tokenizer, ids_of, load
from pdproxy.wire.request import Route, parse

from .client import ask
from .engine import MODEL
from .equality import equal
from .fleet import Fleet
from .proxy import Proxy
from .shapes import SHAPES, Shape

AGREE_WITHIN = 60.0
_ALL = [shape for shape in SHAPES if not shape.alone and shape.status == 200]
SPLIT = _ALL if os.environ.get("PDPROXY_TEST_SHAPES") == "all" else _ALL[::20]
"""All of them take some minutes: `.ci/full` asks for that."""


@pytest.fixture(scope="module")
def tokenizer(fleet: Fleet) -> Tokenizer:
    """That of the engines' model."""
    return load(str(fleet.launcher.built.model))


@pytest.fixture(scope="module")
def agreement(fleet: Fleet, tokenizer: Tokenizer) -> Agreement:
    """What the canaries say of it and the plain engine."""
    answers: dict[str, Answer] = {}
    for canary in CANARIES:
        try:
            answers[canary.name] = _tokenized(fleet, canary.tokenize_body(MODEL))
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            answers[canary.name] = None
    return compare(tokenizer, answers, MODEL)


def test_canaries_agree(agreement: Agreement) -> None:
    """All of them, with the form of content that vLLM finds in the template."""
    assert agreement == Agreement(True, True, {False: "openai", True: "openai"})


@pytest.mark.parametrize("shape", SPLIT, ids=str)
async def test_ids_of_each_shape(fleet: Fleet, tokenizer: Tokenizer, agreement: Agreement, shape: Shape) -> None:
    """What is made here, and what `/tokenize` is asked for in our words, is the prompt that the engine serves."""
    body = shape.make("0a1b2c")
    plain = await ask(fleet.plain.url, shape.path, _one_token(body), None)
    assert plain.status == 200, plain.body
    served = _served(plain.json)
    parsed = parse(Route(shape.path), json.dumps(body).encode())
    for prompt, ids in zip(parsed.prompts, served, strict=True):
        if prompt.tokens is not None:
            continue
        try:
            ours = ids_of(tokenizer, parsed, prompt, agreement.forms)
        except UnsureError:
            assert _unsure(body)
            continue
        assert not _unsure(body)
        assert ours == from_numbers(ids)
        try:
            asked = tokenize_body(parsed, prompt)
        except UnsureError:  # there is no field for it
            assert {"response_format", "tool_choice"} & parsed.fields.keys()
            continue
        assert _tokenized(fleet, asked) == ours


def _one_token(body: dict[str, Any]) -> dict[str, Any]:
    """The body whose answer says the prompt's ids, and little else."""
    dropped = (
        "stream",
        "stream_options",
        "min_tokens",
        "structured_outputs",
        "response_format",
        "max_completion_tokens",
    )
    kept = {name: value for name, value in body.items() if name not in dropped}
    return kept | {"max_tokens": 1, "return_token_ids": True}


def _served(answer: dict[str, Any]) -> list[list[int]]:
    if "prompt_token_ids" in answer:
        return [answer["prompt_token_ids"]]
    return [choice["prompt_token_ids"] for choice in answer["choices"]]


def _tokenized(fleet: Fleet, body: bytes) -> TokenIds:
    return from_numbers(fleet.plain.post("/tokenize", json.loads(body))["tokens"])


def _unsure(body: dict[str, Any]) -> bool:
    """Whether a prompt depends on more than can be known here, and is left to the engines."""
    return "truncate_prompt_tokens" in body or ("tools" in body and body.get("tool_choice") == "none")


@pytest.fixture(scope="module")
def proxy(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy that tokenizes whatever it can."""
    folder: Path = tmp_path_factory.mktemp("tokenize")
    made = Proxy.start(fleet.prefills[:1], fleet.decodes[:1], folder, settings={"pools": [{"tokenize": "always"}]})
    deadline = time.monotonic() + AGREE_WITHIN
    while made.counters().sum("pdproxy_tokenize_agrees") < 2:
        assert time.monotonic() < deadline, made.tail()
        time.sleep(0.2)
    yield made
    assert made.stop() == 0, made.tail()


@pytest.mark.parametrize("shape", SPLIT, ids=str)
async def test_answers_are_equal(fleet: Fleet, proxy: Proxy, shape: Shape) -> None:
    """With ids in place of texts on both legs: answer, events and the KV's way as of a plain engine."""
    result = {"source": "here", "result": "ok"}
    before = proxy.counters().sum("pdproxy_tokenize_total", **result)
    await equal(fleet, proxy, shape)
    made = proxy.counters().sum("pdproxy_tokenize_total", **result) - before
    body = shape.make("0a1b2c")
    prompts = parse(Route(shape.path), json.dumps(body).encode()).prompts
    assert made >= (0 if _unsure(body) else sum(one.tokens is None for one in prompts))
