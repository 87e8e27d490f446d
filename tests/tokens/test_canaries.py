"""Canaries: an engine that makes the same is told from one with another tokenizer, template or way
with parts.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.tokens.canaries import CANARIES, Agreement, CanaryIds, compare
from pdproxy.tokens.errors import RejectedError
from pdproxy.tokens.tokenizer import LocalTokenizer, Tokenizer, ids_of
from pdproxy.wire.route import Route
from tests.tokens.models import TEMPLATE, byte_level, metaspace_first, model

REFUSES_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{{ raise_exception('no') }}{%- endif %}" + TEMPLATE
)


def made(template: str | None = TEMPLATE, kind: Callable[[], Any] = byte_level) -> Tokenizer:
    """A tokenizer."""
    return Tokenizer(copy.deepcopy(model(kind, template)))


def engine(tokenizer: LocalTokenizer, form: Any = "string") -> dict[str, CanaryIds]:
    """What an engine with this tokenizer answers to the canaries."""
    answers: dict[str, CanaryIds] = {}
    for canary in CANARIES:
        try:
            answers[canary.name] = ids_of(tokenizer, *canary.parsed("m"), {False: form, True: form})
        except RejectedError:
            answers[canary.name] = None
    return answers


@pytest.mark.parametrize("form", ["string", "openai"])
def test_an_engine_that_agrees(form: Any) -> None:
    """And how its template is given parts becomes known, with tools and without."""
    assert compare(made(), engine(made(), form), "m") == Agreement(
        True, True, {False: form, True: form}
    )


def test_an_engine_that_refuses_what_we_refuse() -> None:
    """Templates refuse conversations: the same ones on both sides."""
    answers = engine(made(REFUSES_SYSTEM))
    assert answers["a conversation"] is None
    assert compare(made(REFUSES_SYSTEM), answers, "m").chats
    assert compare(made(), answers, "m").differs == ("a conversation", "a developer's message")


def test_another_template() -> None:
    """Chats are left to the engine; completions have no template."""
    agreement = compare(made(TEMPLATE.replace("assistant", "model")), engine(made()), "m")
    assert (agreement.texts, agreement.chats) == (True, False)
    assert "a message" in agreement.differs
    assert "no generation prompt" not in agreement.differs


def test_another_tokenizer() -> None:
    """Nothing is made here."""
    agreement = compare(made(kind=metaspace_first), engine(made()), "m")
    assert (agreement.texts, agreement.chats) == (False, False)


def test_no_template_here() -> None:
    """What can't be made is no difference: it is unsure. Where the engine has none either, there is
    nothing to be unsure of.
    """
    agreement = compare(made(None), engine(made()), "m")
    assert (agreement.texts, agreement.chats, agreement.differs) == (True, False, ())
    assert agreement.unsure[0] == "a message: the model has no chat template"
    refused = {
        one.name: None if one.route is Route.CHAT else engine(made())[one.name] for one in CANARIES
    }
    assert compare(made(None), refused, "m").chats


def test_questions_say_all_that_changes_the_prompt() -> None:
    """An engine's `/tokenize` knows fewer fields than a chat: the others go where the engine would
    put them.
    """
    asked = {one.name: json.loads(one.tokenize_body("m")) for one in CANARIES}
    assert all(one["model"] == "m" for one in asked.values())
    assert asked["a text without special tokens"]["add_special_tokens"] is False
    assert asked["special tokens around a chat"]["add_special_tokens"] is True
    assert asked["a message to be continued"]["continue_final_message"] is True
    assert asked["no generation prompt"]["add_generation_prompt"] is False
    assert len(asked["tools"]["tools"]) == 2
    assert asked["documents"]["chat_template_kwargs"]["documents"][0]["title"] == "Ledger"
    assert asked["an effort"]["chat_template_kwargs"] == {
        "reasoning_effort": "low",
        "enable_thinking": True,
    }
    assert asked["arguments"]["chat_template_kwargs"] == {"enable_thinking": False, "unheard_of": 1}
