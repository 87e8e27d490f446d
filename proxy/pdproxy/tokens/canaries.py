"""Prompts whose ids engines are asked for, to check that the ids made here are the same. Pure:
`fleet.canary` asks the engines.

Together they cover what tokenizers and templates differ in: white space, scripts, digits, special
tokens inside a text, roles, parts, tools, calls and their answers, reasoning, both ends of a
conversation. Engines don't report in which form a template gets a message's content. It is the form
with which all canaries agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdproxy.tokens.chat import ContentFormat
from pdproxy.tokens.errors import RejectedError, UnsureError
from pdproxy.tokens.ids import TokenIds
from pdproxy.tokens.tokenize_request import tokenize_body
from pdproxy.tokens.tokenizer import LocalTokenizer, ids_of
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

TEXT = "The quick brown fox jumps over 13 lazy dogs,  twice.\n\tdéjà vu — 日本語 🦊 ﬁ Ⅳ e\u0301\r\n"
_SPECIALS = "a<s>b</s> c<|im_end|>\n<|endoftext|>d<think> e</think>[INST] f<|eot_id|>"
_LONG = " ".join(f"{number}. {TEXT}" for number in range(8))
_USER = {"role": "user", "content": TEXT}
_PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "And?"}],
}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "forecast", "arguments": '{"city": "Oslo", "days": 2, "zoom": 1.50}'},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "Ask for the forecast — of a day.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "a": {"enum": [1, 2.5]}},
        },
    },
}
_TALK = [
    _USER,
    {"role": "assistant", "content": _LONG},
    {"role": "user", "content": f"{_SPECIALS} {TEXT}"},
]

CanaryIds = TokenIds | None
"""The ids of a canary, made by an engine or here; None: it was refused."""


class Canary(msgspec.Struct, frozen=True):
    """One prompt. `body` is that of a completion or a chat, as a client would send it."""

    name: str
    route: Route
    body: Mapping[str, Any]

    @property
    def tools(self) -> bool:
        """Whether the template gets tools, for which a model may have another template."""
        return "tools" in self.body

    def parsed(self, model: str) -> tuple[Parsed, Prompt]:
        """Return the canary as a request."""
        parsed = parse(self.route, msgspec.json.encode({"model": model, **self.body}))
        (prompt,) = parsed.prompts
        return parsed, prompt

    def tokenize_body(self, model: str) -> bytes:
        """Return the body for an engine's `/tokenize`."""
        return tokenize_body(*self.parsed(model))


def _text(name: str, prompt: str, **fields: object) -> Canary:
    return Canary(name, Route.COMPLETIONS, {"prompt": prompt, **fields})


def _chat(name: str, messages: Sequence[Mapping[str, Any]], **fields: object) -> Canary:
    return Canary(name, Route.CHAT, {"messages": messages, **fields})


CANARIES = (
    _text("text", TEXT),
    _text("a text that begins with a blank", f" {_LONG}"),
    _text("special tokens in a text", _SPECIALS),
    _text("a text without special tokens", TEXT, add_special_tokens=False),
    _chat("a message", [_USER]),
    _chat("a conversation", [{"role": "system", "content": "Be brief."}, *_TALK]),
    _chat("a developer's message", [_USER, {"role": "developer", "content": "Be brief."}]),
    _chat("parts", [_PARTS]),
    _chat(
        "thoughts", [_USER, {"role": "assistant", "content": "Yes.", "reasoning": "Well."}, _USER]
    ),
    _chat("a named speaker", [{**_USER, "name": "Ann"}]),
    _chat("special tokens around a chat", [_USER], add_special_tokens=True),
    _chat("no generation prompt", [_USER], add_generation_prompt=False),
    _chat(
        "a message to be continued",
        [_USER, {"role": "assistant", "content": "It was "}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    _chat("arguments", [_USER], chat_template_kwargs={"enable_thinking": False, "unheard_of": 1}),
    _chat("documents", [_USER], documents=[{"title": "Ledger", "text": TEXT}]),
    _chat("an effort", [_USER], reasoning_effort="low"),
    _chat(
        "tools",
        [_PARTS],
        tools=[_TOOL, {"type": "function", "function": {"name": "tide", "strict": True}}],
    ),
    _chat(
        "a tool's answer",
        [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
        ],
        tools=[_TOOL],
    ),
)

FORMS: tuple[ContentFormat, ...] = ("string", "openai")


class Agreement(msgspec.Struct, frozen=True):
    """Which prompts a tokenizer here encodes as an engine does.

    `texts`, `chats`: whether prompts of that route may be tokenized here; `forms`: the content's
    form without tools and with tools; `differs`: the canaries with other ids; `unsure`: why some
    could not be encoded here.
    """

    texts: bool
    chats: bool
    forms: Mapping[bool, ContentFormat]
    differs: Sequence[str] = ()
    unsure: Sequence[str] = ()


def compare(tokenizer: LocalTokenizer, answers: Mapping[str, CanaryIds], model: str) -> Agreement:
    """Compare an engine's answers, by the canaries' names, with the ids that a tokenizer makes."""
    differs: list[str] = []
    unsure: list[str] = []
    forms: dict[bool, ContentFormat] = {}

    def judge(group: list[Canary], form: ContentFormat) -> tuple[list[str], list[str]]:
        results = [_result(tokenizer, one, answers[one.name], form, model) for one in group]
        wrong = [one.name for one, what in zip(group, results, strict=True) if what == "differs"]
        open_ = [
            f"{one.name}: {what}"
            for one, what in zip(group, results, strict=True)
            if what not in ("same", "differs")
        ]
        return wrong, open_

    def settle(group: list[Canary]) -> ContentFormat:
        tried = [(judge(group, form), form) for form in FORMS]
        (wrong, open_), form = min(tried, key=lambda one: (len(one[0][0]), len(one[0][1])))
        differs.extend(wrong)
        unsure.extend(open_)
        return form

    texts = [one for one in CANARIES if one.route is Route.COMPLETIONS]
    settle(texts)
    texts_agree = not differs and not unsure
    for tools in (False, True):
        forms[tools] = settle(
            [one for one in CANARIES if one.route is Route.CHAT and one.tools is tools]
        )
    named = {one.name for one in texts}
    chats_agree = not [name for name in differs if name not in named] and not [
        why for why in unsure if why.partition(": ")[0] not in named
    ]
    return Agreement(texts_agree, chats_agree, forms, tuple(differs), tuple(unsure))


def _result(
    tokenizer: LocalTokenizer, canary: Canary, answer: CanaryIds, form: ContentFormat, model: str
) -> str:
    parsed, prompt = canary.parsed(model)
    try:
        ours: CanaryIds = ids_of(tokenizer, parsed, prompt, {False: form, True: form})
    except UnsureError as error:
        # If the engine refuses as well, the result is known: it has no template either.
        return "same" if answer is None else str(error)
    except RejectedError:
        ours = None
    return "same" if ours == answer else "differs"
