"""The table of requests whose answers must be a plain engine's: whatever changes a prompt, a token or a byte.

A body is made from a nonce that stands first in its prompt, so that no prefix cache of any engine hides a mistake.
A shape that the proxy sends to one engine alone says why; all others must move their prompt's KV from P to D. The chat
template puts tools behind the messages for the same reason: a prompt without a common head moves as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .engine import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Body = dict[str, Any]

# The values of `reason` in pdproxy_alone_total. The one place to adjust.
ALONE_N, ALONE_ECHO, ALONE_PROMPT_LOGPROBS = "n", "echo", "prompt_logprobs"
ALONE_SHORT, ALONE_CONTENT = "short_prompt", "non_text"

STORY = (
    "The harbour master kept two ledgers. In the first she wrote every ship that came in, its cargo and its draught; "
    "in the second what left again, and when. Nobody had asked her to compare them, but on the last evening of each "
    "month she did, and where a barrel was missing she went down to the quay with a lantern and looked until she knew "
    "where it had gone. "
)
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
CALL = r'<tool_call>\n\{"name": "forecast", "arguments": \{"city": "(Oslo|Rome)", "days": [1-9]\}\}\n</tool_call>'
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
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
class Shape:
    """One row: how the body is made from a nonce, and what is to be expected beside equality."""

    name: str
    path: str
    make: Callable[[str], Body]
    alone: str = ""
    status: int = 200
    header_id: bool = False  # send the nonce as X-Request-Id
    pinned_id: bool = False  # the answer's id must be the client's, so that it is compared too

    def __str__(self) -> str:
        return self.name


def _completion(name: str, /, prompt: Callable[[str], Any] | None = None, **fields: Any) -> Shape:
    own = {key: fields.pop(key) for key in ("alone", "status", "header_id", "pinned_id") if key in fields}
    base = {"model": MODEL, "temperature": 0, "max_tokens": 12} | fields
    return Shape(name, COMPLETIONS, lambda nonce: base | {"prompt": (prompt or story)(nonce)}, **own)


def _chat(name: str, /, messages: Callable[[str], Any] | None = None, **fields: Any) -> Shape:
    own = {key: fields.pop(key) for key in ("alone", "status", "header_id", "pinned_id") if key in fields}
    base = {"model": MODEL, "temperature": 0, "max_tokens": 12} | fields
    return Shape(name, CHAT, lambda nonce: base | {"messages": (messages or question)(nonce)}, **own)


def story(nonce: str) -> str:
    """A prompt of some 200 tokens."""
    return f"{nonce} {STORY}"


def question(nonce: str) -> list[Body]:
    """A chat of one message."""
    return [{"role": "user", "content": story(nonce)}]


def ids(nonce: str, length: int = 150) -> list[int]:
    """Token ids that depend on the nonce from the first one on; none of them is special."""
    seed = int.from_bytes(nonce.encode()[-6:], "big")
    return [5 + (seed * (at + 1) * 2654435761 >> 7) % 4000 for at in range(length)]


def _several(nonce: str) -> list[str]:
    return [f"{number} {nonce} {STORY[: 150 + 120 * number]}" for number in range(3)]


def _conversation(nonce: str) -> list[Body]:
    return [
        {"role": "system", "content": f"{nonce} You keep the ledgers."},
        {"role": "user", "content": [{"type": "text", "text": STORY}, {"type": "text", "text": "What was missing?"}]},
        {"role": "assistant", "content": "A barrel."},
        {"role": "user", "content": "Où ça? 在哪里? 🚢"},
    ]


def _tool_result(nonce: str) -> list[Body]:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "forecast", "arguments": '{"city": "Oslo", "days": 2}'},
    }
    return [
        *question(nonce),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain, then rain."},
    ]


def _image(nonce: str) -> list[Body]:
    pixel = (
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5Er"
        "kJggg=="
    )
    parts = [{"type": "text", "text": story(nonce)}, {"type": "image_url", "image_url": {"url": pixel}}]
    return [{"role": "user", "content": parts}]


SHAPES = [
    # Completions: how the prompt comes.
    _completion("completion"),
    _completion("completion-no-model-named", model=None),
    _completion("completion-token-ids", ids),
    _completion("completion-list", _several),
    _completion("completion-list-streamed", _several, **USAGE),
    _completion("completion-list-of-token-ids", lambda nonce: [ids(nonce, 90), ids(nonce + "b", 140)]),
    _completion("completion-list-of-one", lambda nonce: [story(nonce)], stream=True),
    _completion("completion-short", lambda nonce: nonce[-6:], alone=ALONE_SHORT),
    _completion("completion-without-special-tokens", add_special_tokens=False),
    # What is kept is the end: the nonce stands where its first block begins.
    _completion("completion-truncated-prompt", lambda nonce: f"{STORY}{nonce}{STORY[:150]}", truncate_prompt_tokens=70),
    # Completions: how the answer goes.
    _completion("completion-streamed", stream=True),
    _completion("completion-streamed-usage", **USAGE),
    _completion(
        "completion-streamed-continuous-usage",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    _completion("completion-streamed-no-usage", stream=True, stream_options={"include_usage": False}),
    _completion("completion-stop", stop=["e", "st"], max_tokens=60),
    _completion("completion-stop-streamed", stop=["e", "st"], max_tokens=60, **USAGE),
    _completion("completion-stop-included", stop="e", include_stop_str_in_output=True, max_tokens=60, stream=True),
    _completion("completion-stop-token-ids", stop_token_ids=list(range(300, 1200)), max_tokens=60),
    _completion("completion-min-tokens", stop_token_ids=list(range(300, 3000)), min_tokens=9, max_tokens=40),
    _completion("completion-ignore-eos", ignore_eos=True, max_tokens=80, **USAGE),
    _completion("completion-logprobs", logprobs=3),
    _completion("completion-logprobs-streamed", logprobs=2, **USAGE),
    _completion("completion-token-ids-returned", return_token_ids=True),
    _completion("completion-token-ids-returned-streamed", return_token_ids=True, **USAGE),
    _completion("completion-echo", echo=True, alone=ALONE_ECHO),
    _completion("completion-prompt-logprobs", prompt_logprobs=1, alone=ALONE_PROMPT_LOGPROBS),
    _completion("completion-n", n=2, temperature=0.8, seed=7, alone=ALONE_N),
    # Completions: how tokens are chosen.
    _completion("completion-seed", temperature=0.9, seed=11, top_p=0.95, top_k=50),
    _completion("completion-seed-streamed", temperature=0.9, seed=12, stream=True),
    _completion("completion-logit-bias", logit_bias={"400": 100, "401": 99}),
    _completion(
        "completion-penalties", presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3, max_tokens=40
    ),
    _completion("completion-bad-words", bad_words=["e", " the"], max_tokens=30),
    _completion("completion-choice", structured_outputs={"choice": ["harbour", "ledger"]}),
    _completion("completion-regex-streamed", structured_outputs={"regex": "[a-c]{4}-[0-9]{3}"}, stream=True),
    _completion("completion-json-object", response_format=JSON_SCHEMA, max_tokens=60),
    # Completions: ids and what a client must not reach.
    _completion("completion-header-id", header_id=True, pinned_id=True),
    _completion("completion-forged-handle", kv_transfer_params=FORGED),
    _completion("completion-unknown-field", no_such_field={"a": 1}),
    # Chat: how the prompt comes.
    _chat("chat"),
    _chat("chat-conversation", _conversation),
    _chat("chat-tool-result", _tool_result, tools=TOOLS),
    _chat(
        "chat-continued",
        lambda nonce: [*question(nonce), {"role": "assistant", "content": "It was"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    _chat("chat-short", lambda nonce: [{"role": "user", "content": nonce[-3:]}], alone=ALONE_SHORT),
    _chat("chat-image", _image, alone=ALONE_CONTENT, status=400),
    # Chat: how the answer goes.
    _chat("chat-streamed", stream=True),
    _chat("chat-streamed-usage", **USAGE),
    _chat(
        "chat-streamed-continuous-usage",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    _chat("chat-max-completion-tokens", max_tokens=None, max_completion_tokens=7),
    _chat("chat-stop-streamed", stop=["e"], max_tokens=60, **USAGE),
    _chat("chat-logprobs", logprobs=True, top_logprobs=2),
    _chat("chat-logprobs-streamed", logprobs=True, top_logprobs=2, **USAGE),
    _chat("chat-token-ids-returned", return_token_ids=True),
    _chat("chat-token-ids-returned-streamed", return_token_ids=True, **USAGE),
    _chat(
        "chat-echo",
        lambda nonce: [*question(nonce), {"role": "assistant", "content": "It was"}],
        echo=True,
        alone=ALONE_ECHO,
    ),
    _chat("chat-prompt-logprobs", prompt_logprobs=0, alone=ALONE_PROMPT_LOGPROBS),
    _chat("chat-n", n=2, temperature=0.8, seed=7, alone=ALONE_N),
    _chat("chat-n-streamed", n=2, temperature=0.8, seed=7, alone=ALONE_N, **USAGE),
    _chat("chat-seed-streamed", temperature=1.0, seed=5, stream=True),
    _chat("chat-body-id", request_id="chosen-by-the-client", pinned_id=True),
    # Chat: tools and grammars.
    _chat("chat-tools-auto", tools=TOOLS, tool_choice="auto"),
    _chat("chat-tools-auto-streamed", tools=TOOLS, **USAGE),
    _chat("chat-tools-auto-called", tools=TOOLS, structured_outputs={"regex": CALL}, max_tokens=120),
    _chat("chat-tools-auto-called-streamed", tools=TOOLS, structured_outputs={"regex": CALL}, max_tokens=120, **USAGE),
    _chat("chat-tools-none", tools=TOOLS, tool_choice="none"),
    _chat("chat-tools-required", tools=TOOLS, tool_choice="required", max_tokens=150),
    _chat("chat-tools-required-streamed", tools=TOOLS, tool_choice="required", max_tokens=150, **USAGE),
    _chat(
        "chat-tools-named",
        tools=TOOLS,
        max_tokens=90,
        tool_choice={"type": "function", "function": {"name": "tide_table"}},
    ),
    _chat(
        "chat-tools-named-streamed",
        tools=TOOLS,
        max_tokens=90,
        stream=True,
        tool_choice={"type": "function", "function": {"name": "tide_table"}},
    ),
    _chat("chat-json-schema", response_format=JSON_SCHEMA, max_tokens=60),
    _chat("chat-json-schema-streamed", response_format=JSON_SCHEMA, max_tokens=60, **USAGE),
    _chat("chat-json-object", response_format={"type": "json_object"}, max_tokens=40),
    _chat("chat-choice", structured_outputs={"choice": ["harbour", "ledger"]}),
    # What an engine refuses, it refuses in its own words.
    _chat("error-unknown-model", model="no-such-model", status=404),
    _completion("error-unknown-model-completion", model="no-such-model", status=404),
    _chat("error-temperature", temperature=-1, status=400),
    _completion("error-max-tokens-too-big", max_tokens=5000, status=400),
    _chat("error-max-tokens-zero", max_tokens=0, status=400),
    _completion("error-max-tokens-type", max_tokens="many", status=400),
    _completion("error-min-tokens-over-max-tokens", min_tokens=20, max_tokens=10, status=400),
    _chat("error-stream-options-without-stream", stream_options={"include_usage": True}, status=400),
    _completion("error-prompt-too-long", lambda nonce: story(nonce) * 20, status=400),
    _chat(
        "error-prompt-too-long-streamed",
        lambda nonce: [{"role": "user", "content": story(nonce) * 20}],
        status=400,
        stream=True,
    ),
    _completion("error-top-logprobs", logprobs=5000, status=400),
    _completion("error-stop-streamed", stop=[""], stream=True, status=400),
    _chat("error-empty-messages", lambda nonce: [], status=400),
    _chat("error-bad-role", lambda nonce: [{"role": 5, "content": story(nonce)}], status=400),
    _completion("error-empty-prompt", lambda nonce: "", status=400),
    _completion("error-token-out-of-range", lambda nonce: [*ids(nonce), 999999], status=400),
    _chat("error-tool-choice-without-tools", tool_choice="required", status=400),
    _chat(
        "error-schema",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "zebra"}}},
        status=400,
    ),
    _completion("error-regex", structured_outputs={"regex": "[unclosed"}, status=400),
]
