"""Token ids made by the proxy equal the engines', for every shape of the equality suite, and while
serving.
"""

# A plain engine reports in its answers which ids it served; the test tokenizes the same body. Then
# a proxy with `--tokenize always` answers shapes as the plain engine does, while P and D get ids
# instead of texts.

import json
import os
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdproxy.tokens.canaries import CANARIES, Agreement, CanaryIds, compare
from pdproxy.tokens.errors import UnsureError
from pdproxy.tokens.ids import TokenIds, from_numbers
from pdproxy.tokens.tokenize_request import tokenize_body
from pdproxy.tokens.tokenizer import Tokenizer, ids_of, load
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route

from .client import ask
from .engine import MODEL
from .equality import equal
from .fleet import Fleet
from .proxy import Proxy
from .shapes import SHAPES, Shape

AGREE_WITHIN = 60.0
_ALL = [shape for shape in SHAPES if not shape.alone and shape.status == 200]
SPLIT = _ALL if os.environ.get("PDPROXY_TEST_SHAPES") == "all" else _ALL[::20]
"""All shapes take some minutes: only `.ci/full` runs them."""


@pytest.fixture(scope="module")
def tokenizer(fleet: Fleet) -> Tokenizer:
    """The tokenizer of the engines' model."""
    return load(str(fleet.launcher.built.model))


@pytest.fixture(scope="module")
def agreement(fleet: Fleet, tokenizer: Tokenizer) -> Agreement:
    """The result of the canaries for this tokenizer and the plain engine."""
    answers: dict[str, CanaryIds] = {}
    for canary in CANARIES:
        try:
            answers[canary.name] = _tokenized(fleet, canary.tokenize_body(MODEL))
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            answers[canary.name] = None
    return compare(tokenizer, answers, MODEL)


def test_canaries_agree(agreement: Agreement) -> None:
    """All canaries agree, with the content format that vLLM detects in the template."""
    assert agreement == Agreement(True, True, {False: "openai", True: "openai"})


@pytest.mark.parametrize("shape", SPLIT, ids=str)
async def test_ids_of_each_shape(
    fleet: Fleet, tokenizer: Tokenizer, agreement: Agreement, shape: Shape
) -> None:
    """The proxy's ids, and the answer to its `/tokenize` request, equal the prompt that the engine
    serves.
    """
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
        except UnsureError:  # `/tokenize` has no field for it
            assert {"response_format", "tool_choice"} & parsed.fields.keys()
            continue
        assert _tokenized(fleet, asked) == ours


def _one_token(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose answer contains the prompt's ids and one token."""
    dropped = (
        "stream",
        "stream_options",
        "min_tokens",
        "structured_outputs",
        "response_format",
        "max_completion_tokens",
        "n",  # each choice would have them
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
    """Return whether the proxy leaves a prompt to the engines, because it can't know the result."""
    return "truncate_prompt_tokens" in body or (
        "tools" in body and body.get("tool_choice") == "none"
    )


@pytest.fixture(scope="module")
def proxy(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy with `tokenize: always`."""
    folder: Path = tmp_path_factory.mktemp("tokenize")
    made = Proxy.start(
        fleet.prefills[:1], fleet.decodes[:1], folder, settings={"pools": [{"tokenize": "always"}]}
    )
    deadline = time.monotonic() + AGREE_WITHIN
    while made.counters().sum("pdproxy_tokenize_agrees") < 2:
        assert time.monotonic() < deadline, made.tail()
        time.sleep(0.2)
    yield made
    assert made.stop() == 0, made.tail()


@pytest.mark.parametrize("shape", SPLIT, ids=str)
async def test_answers_are_equal(fleet: Fleet, proxy: Proxy, shape: Shape) -> None:
    """With ids instead of texts on both legs, answer and events equal the plain engine's, and the
    KV moves.
    """
    result = {"source": "here", "result": "ok"}
    before = proxy.counters().sum("pdproxy_tokenize_total", **result)
    await equal(fleet, proxy, shape)
    made = proxy.counters().sum("pdproxy_tokenize_total", **result) - before
    body = shape.make("0a1b2c")
    prompts = parse(Route(shape.path), json.dumps(body).encode()).prompts
    assert made >= (0 if _unsure(body) else sum(one.tokens is None for one in prompts))
