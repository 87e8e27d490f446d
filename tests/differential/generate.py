"""A generator of requests, from the plain to the absurd, that shrinks to the smallest one that shows a difference.

A request is a route, a prompt, and a handful of features; each sets a few fields. Some have a fault or two beside them, since
which fault is named, and how, is part of an answer. Shrinking takes features away, then makes their values simple.
Temperature is 0 or has a seed: what is drawn by chance can't be compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.differential.dialect import Dialect

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Body = dict[str, Any]
Fields = st.SearchStrategy[Body]

SENTENCE = "The harbour master kept two ledgers, one for what came in and one for what left. "
TEXTS = ("a", "Où ça? 在哪里? 🚢", "import os\n", '{"a": [1, 2]}', SENTENCE, "  \n", "<|im_end|>", "e\u0301\ufffd")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome", "Lima"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Ask for the {name}.", "parameters": SCHEMA}}
    for name in ("forecast", "tide_table")
]
FORGED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[]],
    "remote_engine_id": "forged",
    "remote_request_id": "forged",
    "remote_host": "127.0.0.1",
    "remote_port": 9,
}


@dataclass(frozen=True)
class Generated:
    """One request. `times`: how often it is sent, so that the last one finds its prompt cached."""

    path: str
    body: str
    headers: tuple[tuple[str, str], ...] = ()
    times: int = 1

    @property
    def shares_a_block(self) -> bool:
        """Whether it is a list of prompts of which two begin alike: which of them finds the other cached is chance."""
        prompts = json.loads(self.body).get("prompt")
        if not isinstance(prompts, list):
            return False
        heads = [json.dumps(one)[:40] for one in prompts]
        return len(set(heads)) < len(heads)

    def __repr__(self) -> str:
        head = "".join(f" -H '{name}: {value}'" for name, value in self.headers)
        return f"{self.times} x curl {self.path}{head} -d '{self.body}'"


def requests(dialect: Dialect) -> st.SearchStrategy[Generated]:
    """Any request."""
    return st.sampled_from((COMPLETIONS, CHAT)).flatmap(lambda path: _requests(dialect, path))


def _requests(dialect: Dialect, path: str) -> st.SearchStrategy[Generated]:
    prompt = _messages(dialect) if path == CHAT else _prompts(dialect)
    features = _some(_features(dialect, path), 5)
    faults = st.sampled_from((0, 0, 0, 0, 1, 2)).flatmap(lambda most: _some(_faults(dialect, path), most))
    base: Body = {"model": dialect.model, "temperature": 0, "max_tokens": 6}
    streamed = st.sampled_from(({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}))

    def made(
        parts: tuple[Body, tuple[Body, ...], tuple[Body, ...], tuple[tuple[str, str], ...], int, Body],
    ) -> Generated:
        prompt, features, faults, headers, times, stream = parts
        body = base | stream | prompt
        for one in (*features, *faults):
            body |= one
        body = {name: value for name, value in body.items() if value is not ABSENT}
        if body["temperature"] and body.get("seed") is None:
            body["seed"] = 7
        return Generated(path, json.dumps(body, ensure_ascii=False), headers, times)

    return st.tuples(prompt, features, faults, _headers(), st.sampled_from((1, 1, 1, 2)), streamed).map(made)


def _some(known: dict[str, Fields], most: int) -> st.SearchStrategy[tuple[Body, ...]]:
    """Up to so many of these, each once."""
    names = st.lists(st.sampled_from(sorted(known)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.tuples(*(known[name] for name in chosen)))


ABSENT = object()
"""The value of a field that is left out."""


# -- prompts


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


def _ids(dialect: Dialect, lengths: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[list[int]]:
    low, high = dialect.ids

    def spread(drawn: tuple[int, int]) -> list[int]:
        length, seed = drawn
        return [low + (seed + at * at * 7 + at * 13) % (high - low) for at in range(length)]

    return st.tuples(_lengths(dialect) if lengths is None else lengths, st.integers(0, 500)).map(spread)


def _text() -> st.SearchStrategy[str]:
    long = st.tuples(st.integers(0, 999), st.integers(1, 8)).map(lambda drawn: f"{drawn[0]} {SENTENCE * drawn[1]}")
    return st.one_of(long, st.lists(st.sampled_from(TEXTS), max_size=4).map("".join))


def _prompts(dialect: Dialect) -> Fields:
    few = st.integers(1, 3 * dialect.block_size)
    one = st.one_of(_text(), _ids(dialect))
    several = st.one_of(
        st.lists(_text(), min_size=1, max_size=4),
        st.lists(_ids(dialect, few), min_size=1, max_size=4),
    )
    return st.one_of(one, one, several).map(lambda prompt: {"prompt": prompt})


def _messages(dialect: Dialect) -> Fields:
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
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        )
    )
    plain = st.lists(turn, min_size=1, max_size=4)
    strange = st.tuples(plain, odd).map(lambda drawn: [*drawn[0], drawn[1]])
    return st.one_of(plain, plain, plain, plain, strange).map(lambda found: {"messages": found})


def _headers() -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    known = (
        ("x-request-id", "chosen"),
        ("content-type", "application/json; charset=utf-8"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    )
    return st.one_of(st.just(()), st.just(()), st.sampled_from(known).map(lambda one: (one,)))


# -- features


def _features(dialect: Dialect, path: str) -> dict[str, Fields]:
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
            lambda value: {"max_tokens": value, "stop": ["e"], "stop_token_ids": list(range(low, high, 3))}
        ),
        "min_tokens": st.integers(0, 3).map(lambda value: {"min_tokens": value, "max_tokens": 7}),
        "stop": st.lists(
            st.sampled_from(("e", " t", "the", "th", "or", " ", "\n", "ö", "{", "zzz")), min_size=1, max_size=3
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
        "allowed": st.lists(tokens, min_size=1, max_size=4).map(lambda ids: {"allowed_token_ids": ids}),
        "ids returned": st.booleans().map(lambda value: {"return_token_ids": value}),
        "tokens as ids": st.just({"return_tokens_as_token_ids": True}),
        "specials kept": st.just({"skip_special_tokens": False}),
        "choice": st.just({"structured_outputs": {"choice": ["harbour", "ledger"]}}),
        "regex": st.just({"structured_outputs": {"regex": "[a-c]{4}-[0-9]{3}"}}),
        "grammar": st.just({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}),
        "schema": st.just({"structured_outputs": {"json": SCHEMA}, "max_tokens": 40}),
        "response_format": st.sampled_from(
            (
                {"type": "json_object"},
                {"type": "text"},
                {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}},
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
        "nulls": st.sampled_from(("n", "seed", "stop", "top_p", "logit_bias", "stream_options", "tools", "user")).map(
            lambda name: {name: None}
        ),
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
        "tools": _tools(ABSENT, "none", "auto", "required", {"type": "function", "function": {"name": "tide_table"}}),
        "continued": st.just({"add_generation_prompt": False, "continue_final_message": True}),
        "no generation prompt": st.just({"add_generation_prompt": False}),
        "template kwargs": st.booleans().map(lambda value: {"chat_template_kwargs": {"enable_thinking": value}}),
        "echo": st.booleans().map(lambda value: {"echo": value}),
        "no reasoning": st.just({"include_reasoning": False}),
        "specials": st.booleans().map(lambda value: {"add_special_tokens": value}),
    }


def _tools(*choices: Any) -> Fields:
    def made(drawn: tuple[list[Body], Any, Any]) -> Body:
        tools, choice, parallel = drawn
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 60}

    tools = st.sampled_from((TOOLS, TOOLS[1:], [{"type": "function", "function": {"name": "tide_table"}}]))
    return st.tuples(tools, st.sampled_from(choices), st.sampled_from((ABSENT, True, False))).map(made)


# -- faults


def _faults(dialect: Dialect, path: str) -> dict[str, Fields]:
    shared = {
        "max_tokens": _values("max_tokens", 0, -1, dialect.max_model_len, 10**6, "7", 2.0, 2.5),
        "min_tokens": _values("min_tokens", -1, 10**6, "x"),
        "usage without stream": st.just({"stream": False, "stream_options": {"include_usage": True}}),
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
                    *("stream", "n", "stop", "seed", "min_tokens", "stop_token_ids", "top_p", "user", "stream_options"),
                    *("ignore_eos", "return_token_ids", "structured_outputs", "priority", "echo", "logprobs"),
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
            None, "always", {}, {"type": "function", "function": {"name": "nobody"}}, {"type": "function"}
        ),
        "tools": _values("tools", [], [{"type": "function"}], [{}], "x"),
        "tool_choice alone": _values("tool_choice", "required", "auto", "none"),
        "messages": _values("messages", [], None, "x", {}, [{}], ["a"], [{"role": "user"}], ABSENT),
    }
