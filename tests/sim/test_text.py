"""What the simulated API server does with tokens and texts: detokenizing, stop strings, structured
outputs, tool calls.
"""

import json
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_lab.sim.api.detokenizer import Detokenizer
from pdproxy_lab.sim.api.errors import EngineRefused, RefusedRequest
from pdproxy_lab.sim.api.protocol import ChatBody
from pdproxy_lab.sim.api.sampling import admit, sampling_params
from pdproxy_lab.sim.api.structured import TextGrammar, texts_of_regex, texts_of_schema
from pdproxy_lab.sim.api.template import render
from pdproxy_lab.sim.api.tools import CallParser, calls_tools, grammar_of_calls
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.tokenizer import EOS, BuiltInTokenizer

TOKENIZER = BuiltInTokenizer()
TEXT = st.text(st.sampled_from(list("ab c.é🦊\n")), max_size=40)


@given(TEXT)
def test_pieces_are_the_whole_and_characters_are_never_cut(text):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = []
    for token in TOKENIZER.encode(text):
        assert detokenizer.add([token], False) is None
        pieces.append(detokenizer.take(False))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@given(
    TEXT, st.lists(st.text("ab .", min_size=1, max_size=3), min_size=1, max_size=2), st.booleans()
)
def test_a_stop_string_ends_the_text_where_it_first_stands(text, stops, included):
    detokenizer = Detokenizer(TOKENIZER, stops, include_stop=included)
    taken, found, before = "", None, ""
    ids = TOKENIZER.encode(text)
    for number, token in enumerate(ids):
        found = detokenizer.add([token], False)
        taken += detokenizer.take(found is not None)
        if found is not None:
            before = TOKENIZER.decode(ids[:number])
            break
    taken += detokenizer.take(True)
    if found is None:
        assert taken == text
        assert not any(stop in text for stop in stops)
        return
    kept = taken.removesuffix(found) if included else taken
    assert text.startswith(kept + found)
    # One that was complete earlier would have been found with its own token. Of those that one
    # token completes, the first in the request's order counts, so the text that is kept may have
    # another one.
    assert all(stop not in before for stop in stops)
    assert found == next(stop for stop in stops if stop in kept + found)


@given(st.text("ab", max_size=12), st.integers(0, 8))
def test_a_stop_string_before_min_tokens_does_not_count(text, least):
    detokenizer = Detokenizer(TOKENIZER, ["a"], min_tokens=least)
    ids = TOKENIZER.encode(text)
    for number, token in enumerate(ids, 1):
        if detokenizer.add([token], False) is not None:
            assert number > least
            return
    assert "a" not in TOKENIZER.decode(ids[least:])


def test_what_may_be_a_stop_string_is_held_back():
    detokenizer = Detokenizer(TOKENIZER, ["xyz"])
    detokenizer.add(TOKENIZER.encode("abxy"), False)
    assert detokenizer.take(False) == "ab"
    detokenizer.add(TOKENIZER.encode("q"), False)
    assert detokenizer.take(False) == "xy"[:1]
    assert detokenizer.take(True) == "yq"


def test_the_token_that_stopped_is_no_text_unless_asked_for():
    silent, told = Detokenizer(TOKENIZER), Detokenizer(TOKENIZER, include_stop=True)
    for one in (silent, told):
        one.add(TOKENIZER.encode(" the river"), True)
    assert (silent.take(True), told.take(True)) == (" the", " the river")


SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
    },
    {"type": "array", "items": {"type": "number"}, "minItems": 3},
    {"anyOf": [{"type": "null"}, {"const": 5}, {"type": "boolean"}]},
    {
        "$defs": {"n": {"type": "string", "minLength": 9}},
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"],
    },
    {"type": ["string", "integer"]},
    {"type": "string", "pattern": "[a-c]{2}-\\d+"},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_texts_of_a_schema_fit_it(schema):
    texts = texts_of_schema(schema)
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "pattern", ["[a-c]{4}-[0-9]{3}", r"(yes|no)\d*", r"\w+ \w+\s?", "[^a]b?", "x{2,5}.", "^a$"]
)
def test_texts_of_an_expression_match_it(pattern):
    assert all(re.fullmatch(pattern, text) for text in texts_of_regex(pattern))


@pytest.mark.parametrize("bad", ["[unclosed", "(", "a{2"])
def test_an_expression_that_makes_no_sense_is_refused(bad):
    if bad == "a{2":
        assert texts_of_regex(bad)[0] == "a{2"  # to Python's re this is text
        return
    with pytest.raises(EngineRefused, match="regex"):
        texts_of_regex(bad)


def test_a_schema_that_makes_no_sense_is_refused():
    with pytest.raises(EngineRefused, match="zebra"):
        texts_of_schema({"type": "zebra"})


def test_a_grammar_leads_to_one_of_its_texts_and_then_the_end():
    grammar = TextGrammar(TOKENIZER, ["harbour one", "harbour two", "ledger"])
    said: list[int] = []
    while (allowed := list(grammar.allowed(said))) != [EOS]:
        said.append(allowed[-1])
    assert TOKENIZER.decode(said) == "ledger"
    assert set(grammar.allowed(TOKENIZER.encode("harbour"))) == {
        TOKENIZER.encode(" one")[0],
        TOKENIZER.encode(" two")[0],
    }


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMAS[0]}}
    for name in ("tide", "wind")
]


def body(**fields):
    return ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    )


@pytest.mark.parametrize(
    "choice", ["required", "auto", {"type": "function", "function": {"name": "wind"}}]
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_comes_as_its_name_and_pieces_of_its_arguments(choice, size):
    grammar = grammar_of_calls(body(tool_choice=choice), TOKENIZER)
    said: list[int] = []
    while (allowed := list(grammar.allowed(said))) != [EOS]:
        said.append(allowed[0])
    text = TOKENIZER.decode(said, skip_special_tokens=False)
    parser = CallParser("call-1")
    deltas = [parser.add(text[at : at + size]) for at in range(0, len(text), size)] + [
        parser.add("")
    ]
    told = [delta for delta in deltas if delta]
    assert told[0] == {
        "content": None,
        "tool_calls": [
            {"id": "call-1", "type": "function", "index": 0, "function": {"name": parser.name}}
        ],
    }
    arguments = "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in told[1:])
    assert arguments == parser.arguments
    jsonschema.validate(json.loads(arguments), SCHEMAS[0])
    assert parser.name == ("wind" if isinstance(choice, dict) else "tide")
    assert parser.content is None


def test_free_text_passes_the_parser_of_calls():
    parser = CallParser("call-1")
    assert [parser.add(piece) for piece in ("the ", "river <", "tool_call>")] == [
        {"content": "the "},
        {"content": "river <"},
        {"content": "tool_call>"},
    ]
    assert (parser.name, parser.content) == (None, "the river <tool_call>")


def test_tools_are_called_when_they_must_be_and_never_when_they_must_not():
    assert calls_tools(body(tool_choice="required"), [1, 2])
    assert not calls_tools(body(tool_choice="none"), [1, 2])
    assert {calls_tools(body(), [number]) for number in range(40)} == {True, False}


def test_templates_differ_and_print_what_they_are_given():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    chatml = render("chatml", messages)
    assert chatml == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert (
        len(
            {
                chatml,
                render("plain", messages),
                render("dated", messages, date="1 May"),
                render("dated", messages, date="2 May"),
            }
        )
        == 4
    )
    assert "tide" in render("chatml", messages, tools=TOOLS)
    assert render("chatml", messages, continue_final_message=True) == "<|im_start|>user\na\nb"
    assert "</think>" in render("chatml", messages, kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": 5}], [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]],
)
def test_conversations_that_can_not_be_rendered_are_refused(messages):
    with pytest.raises(RefusedRequest):
        render("chatml", messages)


@pytest.mark.parametrize(("budget", "refused"), [(-1, False), (None, False), (0, True), (3, True)])
def test_a_budget_of_thoughts_needs_a_parser(budget, refused):
    body = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "thinking_token_budget": budget}
    )
    params = sampling_params(body, [5], SimFacts(), TOKENIZER)
    if refused:
        with pytest.raises(EngineRefused, match="reasoning_config"):
            admit(params, body, [5], SimFacts(), TOKENIZER)
    else:
        admit(params, body, [5], SimFacts(), TOKENIZER)
        assert params.thinking_token_budget is None
