"""`/v1/responses`: OpenAI's Responses API, without memory.

Owns which requests can't be split. An engine that runs tools by itself (`gpt-oss` with
`--tool-server`) sends its scheduler the KV handle of the first turn again with each further turn,
and so would read KV that is another prompt's by then. Requests that name such a tool, that run in
the background, or that refer to what an engine has stored are left to one engine.

Both legs ask for no storage: the next request may go to an engine that does not have what was
stored. Source: vLLM 0.32.0 `entrypoints/openai/responses/protocol.py`, `serving.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdproxy.kit.errors import BadRequestError
from pdproxy.kit.ids import mint, usable
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer, PrefillChoice, TokensDetails, Usage
from pdproxy.wire.fields import Fields, body_request_id, has_value, is_absent, read_field
from pdproxy.wire.passed_usage import usage_in
from pdproxy.wire.passthrough_body import TRUE_TEXTS, PassedBody, changed_body
from pdproxy.wire.route_form import Alone, Prompt, Reading, RouteForm
from pdproxy.wire.unusual import LIST, NOTHING, Content, UnusualError

_TEXT_ITEMS = frozenset(
    f'"{name}"'.encode()
    for name in (
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    )
)
"""Types of `input` items whose content is a text, or a list of parts."""
_REASONING = frozenset({b'"reasoning_text"', b'"summary_text"'})
"""Types of parts, in JSON, that are text here besides the usual ones."""
_BUILT_IN_TOOLS = ("web_search_preview", "code_interpreter", "container", "mcp")
"""How the types of tools begin that an engine may run by itself."""
_ONE_ENGINE = ("previous_response_id", "previous_input_messages", "prompt", "conversation")
"""Fields that only an engine can judge."""
_NOT_ON_PREFILL = ("include", "top_logprobs", "structured_outputs", "background")
_FALSE_TEXTS = frozenset({"0", "false", "f", "no", "n", "off"})
_LONGEST_BOOLEAN = 64
"""Bytes of JSON. A longer number counts as true, since reading it could take long."""
_ID_PREFIX = "resp_"
_NUMBER = b"-0123456789"
"""How a number begins."""
_ONE, _TRUE, _FALSE = msgspec.Raw(b"1"), msgspec.Raw(b"true"), msgspec.Raw(b"false")
_NULL = msgspec.Raw(b"null")


class _Item(msgspec.Struct):
    type: msgspec.Raw = _NULL
    content: msgspec.Raw = _NULL
    output: msgspec.Raw = _NULL


class _Tool(msgspec.Struct):
    type: str = ""


class _Messages(msgspec.Struct):
    tokens: msgspec.Raw = _NULL


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens_details: _CachedTokens | None = None


class _Answer(msgspec.Struct):
    object: Literal["response"]
    status: str = ""
    kv_transfer_params: msgspec.Raw = _NULL
    input_messages: list[_Messages] | None = None
    usage: _Usage | None = None


_items_decoder = msgspec.json.Decoder(list[_Item])
_members_decoder = msgspec.json.Decoder(list[Fields])
_tools_decoder = msgspec.json.Decoder(list[_Tool] | None)
_bool_decoder = msgspec.json.Decoder(bool | None)
_int_decoder = msgspec.json.Decoder(int | None)
_text_decoder = msgspec.json.Decoder(str | None)
_answers = msgspec.json.Decoder(_Answer)


def read(fields: Fields, _bounds: Bounds) -> Reading:
    """Read a body: see `route_form.Read`."""
    if not all(is_absent(fields, name) for name in _ONE_ENGINE):
        raise UnusualError
    if "request_id" in fields and usable(body_request_id(fields)) is None:
        raise UnusualError  # legs may have ids of their own: the client would not get this one
    if read_field(fields, "background", _bool_decoder):
        raise UnusualError
    read_field(fields, "store", _bool_decoder)
    limit = read_field(fields, "max_output_tokens", _int_decoder)
    if limit is not None and limit < 1:
        raise UnusualError
    wants_prompt = read_field(fields, "enable_response_messages", _bool_decoder)
    text = memoryview(fields["instructions"]).nbytes if "instructions" in fields else 0
    if text:
        read_field(fields, "instructions", _text_decoder)
    raw = fields.get("input")
    if raw is None:
        raise UnusualError
    found, messages = _input(raw)
    size = text + found.size
    prompts = (Prompt(None, None, size, messages + bool(text), media=tuple(found.media)),)
    if found.is_alone:
        return Reading(prompts, Alone.NON_TEXT)
    if wants_prompt:  # a decode engine that gets the ids does not have the text (vLLM 0.32.0)
        return Reading(prompts, Alone.ECHO)
    tools = read_field(fields, "tools", _tools_decoder) or ()
    if any(tool.type.startswith(_BUILT_IN_TOOLS) for tool in tools):
        return Reading(prompts, Alone.BUILT_IN_TOOLS)
    return Reading(prompts, None)


def _input(raw: msgspec.Raw) -> tuple[Content, int]:
    """Return what is known of `input`, and how many messages it is."""
    found = Content()
    found.size = memoryview(raw).nbytes
    if bytes(memoryview(raw)[:1]) == b'"':
        return found, 1
    items = _items_decoder.decode(raw)
    if not items:
        raise UnusualError
    members: list[Fields] | None = None
    for at, item in enumerate(items):
        kind, content = bytes(item.type), memoryview(item.content)
        if kind not in _TEXT_ITEMS and (kind != b"null" or content[0] == NOTHING):
            raise UnusualError
        lists = [(item.content, _REASONING)] if content[0] == LIST else []
        if memoryview(item.output)[0] == LIST:
            lists.append((item.output, frozenset()))
        if len(lists) > 1:  # media are found in the order of the body
            members = members or _members_decoder.decode(raw)
            names = list(members[at])
            if names.index("output") < names.index("content"):
                lists.reverse()
        for parts, text_types in lists:
            found.add_parts(parts, text_types)
    return found, len(items)


def both(fields: Fields) -> None:
    """Change the fields of both legs: engines store nothing. vLLM's default is to store."""
    if not has_value(fields, "store", b"false"):
        fields["store"] = _FALSE


def whole(fields: Fields, model: str | None) -> PassedBody:
    """Return the client's own body so that the engine stores nothing.

    vLLM without `VLLM_ENABLE_RESPONSES_API_STORE` ignores `store`, answers `previous_response_id`
    with 404 and `background` with 400. Clients get these answers, whether the engine has that or
    not.

    Raises:
        BadRequestError: it asks for a stored conversation.
    """
    if not (is_absent(fields, "conversation") or has_value(fields, "conversation", b"false")):
        why = "no conversation is stored: send the whole of it as `input`"
        raise BadRequestError(f"`conversation` is not supported: {why}", param="conversation")
    unknown_id = None
    changed: Fields = {}
    if _boolean(fields, "background") is not False:
        unknown_id = f"{_ID_PREFIX}{mint()}"
        changed["previous_response_id"] = msgspec.Raw(msgspec.json.encode(unknown_id))
    elif "store" not in fields or _boolean(fields, "store"):
        # vLLM's default is true: an engine that is set to store would keep every response until it
        # ends.
        changed["store"] = _FALSE
        if not (is_absent(fields, "background") or has_value(fields, "background", b"false")):
            # vLLM takes "no" for true where it compares it with `store`
            changed["background"] = _FALSE
    return changed_body(fields, model, changed, unknown_id)


def _boolean(fields: Fields, name: str) -> bool | None:
    """Return how vLLM reads a field, None if not at all. It takes some texts and numbers for a
    boolean, and null for False.
    """
    if is_absent(fields, name):
        return False
    raw = fields[name]
    if (view := memoryview(raw)).nbytes > _LONGEST_BOOLEAN:
        return True if view[0] in _NUMBER else None  # an engine reads 1.000...0 as 1
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None
    if isinstance(value, str):
        text = value.strip().lower()
        return text in TRUE_TEXTS if text in TRUE_TEXTS | _FALSE_TEXTS else None
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def prefill(fields: Fields) -> None:
    """Make the fields those of a prefill leg: one token, not streamed, with the prompt's ids."""
    for name in _NOT_ON_PREFILL:
        fields.pop(name, None)
    fields["max_output_tokens"] = _ONE
    fields["stream"] = _FALSE
    fields["enable_response_messages"] = _TRUE


def prefill_answer(body: bytes) -> PrefillAnswer | None:
    """Read a prefill engine's answer; None if it is not one. A model with its own form of messages
    (`gpt-oss`) reports no ids.
    """
    try:
        answer = _answers.decode(body)
    except UNREADABLE:
        return None
    usage = usage_in(body)
    if usage is None:
        return None
    listed = answer.input_messages or ()
    ids = listed[0].tokens if len(listed) == 1 else _NULL
    details = None if answer.usage is None else answer.usage.input_tokens_details
    cached = None if details is None else details.cached_tokens
    created = None if details is None else details.cache_write_tokens
    return PrefillAnswer(
        answer.kv_transfer_params,
        ids,
        [PrefillChoice(finish_reason="length" if answer.status == "incomplete" else "stop")],
        Usage(
            usage.prompt_tokens,
            usage.total_tokens,
            usage.completion_tokens,
            TokensDetails(cached, created),
        ),
    )


FORM = RouteForm(
    path="/v1/responses",
    dialect=Dialect.RESPONSES,
    read=read,
    prompt_fields=("instructions", "tools", "input"),
    listed={},
    limits=("max_output_tokens",),
    answers=(),
    has_min_tokens=False,
    unseen=("include", "structured_outputs"),
    has_usage_event=False,
    has_rank_header=False,
    body_id_prefix=_ID_PREFIX,
    checks_all_media=True,
    prefill=prefill,
    both=both,
    whole=whole,
    prefill_answer=prefill_answer,
    returns_ids=False,
    takes_ids=False,
    is_named=True,
    goes_whole=lambda _: True,
    has_own_words=True,
)
