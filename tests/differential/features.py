"""What a generated request asks for beside its prompt, and the faults that it may have."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.differential.dialect import Dialect
from tests.differential.fields import ABSENT, CHAT, COMPLETIONS, Body, Fields
from tests.engines.prompts import FORGED, GRAMMAR, SCHEMA, TOOLS


def features(dialect: Dialect, path: str) -> dict[str, Fields]:
    return _shared(dialect) | (_of_chat() if path == CHAT else _of_completions())


def _values(name: str, *values: Any) -> Fields:
    return st.sampled_from(values).map(lambda value: {name: value})


def _shared(dialect: Dialect) -> dict[str, Fields]:
    low, high = dialect.ids
    tokens = st.integers(low, high - 1)
    usage = st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    )
    return {
        "usage": usage.map(lambda options: {"stream": True, "stream_options": options}),
        "max_tokens": _values("max_tokens", 1, 2, 3, 9, dialect.longest_answer),
        "no max_tokens": st.sampled_from((ABSENT, None)).map(
            lambda value: {
                "max_tokens": value,
                "stop": ["e"],
                "stop_token_ids": list(range(low, high, 3)),
            }
        ),
        "min_tokens": st.integers(0, 3).map(lambda value: {"min_tokens": value, "max_tokens": 7}),
        "stop": st.lists(
            st.sampled_from(("e", " t", "the", "th", "or", " ", "\n", "ö", "{", "zzz")),
            min_size=1,
            max_size=3,
        ).map(lambda value: {"stop": value}),
        "stop of one": _values("stop", "e", None, []),
        "stop tokens": st.tuples(st.integers(low, high - 1), st.integers(1, high - low)).map(
            lambda drawn: {"stop_token_ids": list(range(drawn[0], min(high, drawn[0] + drawn[1])))}
        ),
        "stop included": st.just({"include_stop_str_in_output": True}),
        "end at once": st.just({"logit_bias": {str(dialect.eos): 100}}),
        "ignore_eos": st.just({"ignore_eos": True, "logit_bias": {str(dialect.eos): 100}}),
        "n seeded": st.tuples(st.integers(1, 4), st.integers(0, 99)).map(
            lambda drawn: {"n": drawn[0], "temperature": 0.9, "seed": drawn[1]}
        ),
        "seed": st.tuples(st.sampled_from((0.1, 0.7, 1, 2)), st.integers(-3, 99)).map(
            lambda drawn: {"temperature": drawn[0], "seed": drawn[1]}
        ),
        "nucleus": st.fixed_dictionaries(
            {"temperature": st.just(0.8), "seed": st.integers(0, 9)},
            optional={
                "top_p": st.sampled_from((0.5, 1)),
                "top_k": st.integers(-1, 50),
                "min_p": st.sampled_from((0, 0.1)),
            },
        ),
        "prompt_logprobs": _values("prompt_logprobs", 0, 2),
        "penalties": st.fixed_dictionaries(
            {},
            optional={
                "presence_penalty": st.sampled_from((-2, 0.5)),
                "frequency_penalty": st.just(0.7),
                "repetition_penalty": st.just(1.3),
            },
        ),
        "bias": tokens.map(lambda token: {"logit_bias": {str(token): 100}}),
        "half a character": st.just({"logit_bias": {str(dialect.half): 100}}),
        "bad words": st.just({"bad_words": ["e", " the"]}),
        "allowed": st.lists(tokens, min_size=1, max_size=4).map(
            lambda ids: {"allowed_token_ids": ids}
        ),
        "ids returned": st.booleans().map(lambda value: {"return_token_ids": value}),
        "tokens as ids": st.just({"return_tokens_as_token_ids": True}),
        "specials kept": st.just({"skip_special_tokens": False}),
        "choice": st.just({"structured_outputs": {"choice": ["harbour", "ledger"]}}),
        "regex": st.just({"structured_outputs": {"regex": "[a-c]{4}-[0-9]{3}"}}),
        "grammar": st.just({"structured_outputs": {"grammar": GRAMMAR}}),
        "schema": st.just({"structured_outputs": {"json": SCHEMA}, "max_tokens": 40}),
        "response_format": st.sampled_from(
            (
                {"type": "json_object"},
                {"type": "text"},
                {
                    "type": "json_schema",
                    "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True},
                },
            )
        ).map(lambda form: {"response_format": form, "max_tokens": 40}),
        "salt": _values("cache_salt", "a", "pepper"),
        "priority": _values("priority", -1, 0, 1),
        "cut": _values("truncate_prompt_tokens", -1, 1, 20),
        "cut right": st.just({"truncate_prompt_tokens": 20, "truncation_side": "right"}),
        "unknown": _values("no_such_field", None, 1, {"a": [1, {"b": None}]}, "x"),
        "no model": _values("model", ABSENT, None),
        "user": st.just({"user": "u", "metadata": {"a": "b"}, "service_tier": "auto"}),
        "body id": st.just({"request_id": "chosen-by-the-client"}),
        "forged": st.sampled_from(
            (
                {"kv_transfer_params": FORGED},
                {"vllm_xargs": {"kv_transfer_params": "forged"}},
                {"ec_transfer_params": {"a": 1}},
            )
        ),
        "ids for messages": st.lists(tokens, min_size=1, max_size=60).map(
            lambda ids: {"kv_transfer_params": {"prompt_token_ids": ids}}
        ),
        "nulls": st.sampled_from(
            ("n", "seed", "stop", "top_p", "logit_bias", "stream_options", "tools", "user")
        ).map(lambda name: {name: None}),
    }


def _of_completions() -> dict[str, Fields]:
    return {
        "logprobs": st.integers(0, 5).map(lambda value: {"logprobs": value}),
        "echo": st.booleans().map(lambda value: {"echo": value}),
        "echo alone": st.fixed_dictionaries(
            {"echo": st.just(True), "max_tokens": st.just(0), "logprobs": st.integers(0, 1)}
        ),
        "suffix": st.just({"suffix": "x"}),
        "no specials": st.booleans().map(lambda value: {"add_special_tokens": value}),
    }


def _of_chat() -> dict[str, Fields]:
    return {
        "max_completion_tokens": _values("max_completion_tokens", 1, 2, 7, None),
        "logprobs": st.integers(0, 5).map(lambda top: {"logprobs": True, "top_logprobs": top}),
        "tools": _tools(
            ABSENT,
            "none",
            "auto",
            "required",
            {"type": "function", "function": {"name": "tide_table"}},
        ),
        "continued": st.just({"add_generation_prompt": False, "continue_final_message": True}),
        "no generation prompt": st.just({"add_generation_prompt": False}),
        "template kwargs": st.booleans().map(
            lambda value: {"chat_template_kwargs": {"enable_thinking": value}}
        ),
        "echo": st.booleans().map(lambda value: {"echo": value}),
        "prompt text": st.booleans().map(lambda value: {"return_prompt_text": value}),
        "no reasoning": st.just({"include_reasoning": False}),
        "short thoughts": st.integers(0, 4).map(
            lambda most: {"thinking_token_budget": most, "max_tokens": 12}
        ),
        "specials": st.booleans().map(lambda value: {"add_special_tokens": value}),
    }


def _tools(*choices: Any) -> Fields:
    def made(drawn: tuple[list[Body], Any, Any]) -> Body:
        tools, choice, parallel = drawn
        return {
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "max_tokens": 60,
        }

    tools = st.sampled_from(
        (TOOLS, TOOLS[1:], [{"type": "function", "function": {"name": "tide_table"}}])
    )
    return st.tuples(tools, st.sampled_from(choices), st.sampled_from((ABSENT, True, False))).map(
        made
    )


def faults(dialect: Dialect, path: str) -> dict[str, Fields]:
    shared: dict[str, Fields] = {
        "max_tokens": _values("max_tokens", 0, -1, dialect.max_model_len, 10**6, "7", 2.0, 2.5),
        "min_tokens": _values("min_tokens", -1, 10**6, "x"),
        "usage without stream": st.just(
            {"stream": False, "stream_options": {"include_usage": True}}
        ),
        "stop": _values("stop", "", ["", "a"], 5),
        "n": _values("n", 0, -1, 2, 10**6, "2"),
        "range": st.sampled_from(
            (
                {"temperature": -1},
                {"temperature": 3},
                {"top_p": 0.0},
                {"top_p": 2},
                {"top_k": -2},
                {"min_p": 2},
                {"presence_penalty": 3},
                {"frequency_penalty": -2.5},
                {"repetition_penalty": 0},
            )
        ),
        "prompt_logprobs": _values("prompt_logprobs", -2, -1, 10**3, "1"),
        "bad regex": st.just({"structured_outputs": {"regex": "[unclosed"}}),
        "two grammars": st.just({"structured_outputs": {"json": SCHEMA, "regex": "a"}}),
        "response_format": _values(
            "response_format",
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "zebra"}}},
            {"type": "zebra"},
            5,
        ),
        "salt": _values("cache_salt", "", 5),
        "cut": _values("truncate_prompt_tokens", -2, 0, 10**6),
        "whole template": st.just({"chat_template": "{{ messages }}"}),
        "other model": _values("model", "no-such-model", "", 7),
        "bias": _values("logit_bias", {"-1": 1}, {str(dialect.vocab_size): 1}, {"x": 1}, [1]),
        "wrong type": st.tuples(
            st.sampled_from(
                (
                    *(
                        "stream",
                        "n",
                        "stop",
                        "seed",
                        "min_tokens",
                        "stop_token_ids",
                        "top_p",
                        "user",
                        "stream_options",
                    ),
                    *(
                        "ignore_eos",
                        "return_token_ids",
                        "structured_outputs",
                        "priority",
                        "echo",
                        "logprobs",
                    ),
                )
            ),
            st.sampled_from(({}, [], "x", 1, -1, 1.5, True, None, [1], {"a": 1})),
        ).map(lambda drawn: {drawn[0]: drawn[1]}),
        "beam": st.just({"use_beam_search": True}),
    }
    if path == COMPLETIONS:
        return shared | {
            "logprobs": _values("logprobs", -2, -1, 10**3),
            "prompt": _values(
                "prompt",
                *(
                    [],
                    [[]],
                    "",
                    None,
                    7,
                    ["a", [1, 2]],
                    [[1, 2], []],
                    ["a", ""],
                    [1, "a"],
                    [1.5],
                    [-1],
                    {"a": 1},
                    [True],
                ),
                *([dialect.vocab_size], [dialect.vocab_size - 1], ABSENT),
            ),
        }
    return shared | {
        "max_completion_tokens": _values("max_completion_tokens", 0, 10**6),
        "top alone": st.just({"top_logprobs": 2}),
        "top": st.integers(-2, -1).map(lambda top: {"logprobs": True, "top_logprobs": top}),
        "both continued": st.just({"add_generation_prompt": True, "continue_final_message": True}),
        "tool choice": _tools(
            None,
            "always",
            {},
            {"type": "function", "function": {"name": "nobody"}},
            {"type": "function"},
        ),
        "tools": _values("tools", [], [{"type": "function"}], [{}], "x"),
        "tool_choice alone": _values("tool_choice", "required", "auto", "none"),
        "messages": _values("messages", [], None, "x", {}, [{}], ["a"], [{"role": "user"}], ABSENT),
    }
