"""Whether another engine may go on with a stream if its engine fails. This is known before the
stream begins. Pure.

The other engine gets a completion whose prompt is the ids of the prompt and of the answer so far.
The rest of the answer is right if two conditions hold: the answer so far has an effect on the rest
through its ids alone, and nothing parses the answer from its beginning. A field that is not known
here may break either condition, so a request with such a field is not continued. Source: vLLM
0.32.0 `v1/sample/`, `v1/engine/detokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from pdproxy.wire.fields import Fields, has_value, is_absent
from pdproxy.wire.request import Parsed, limit_of
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone

SAME_IN_COMPLETIONS = (
    "model",
    "user",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "logit_bias",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "priority",
    "cache_salt",
)
"""Fields with the same meaning in a completion as in a chat, and the same behind some of the answer
as before it.
"""
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
"""Sent with the fields above where they are neutral: an engine's generation config may have others
for clients that send none.
"""
PROMPT_ONLY = (
    "prompt",
    "messages",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "return_token_ids",
    "request_id",
    "n",
)
"""Fields that only shape the prompt, or are handled one by one."""
NEUTRAL: Mapping[str, tuple[bytes, ...]] = {
    "frequency_penalty": (b"0", b"0.0"),
    "presence_penalty": (b"0", b"0.0"),
    "repetition_penalty": (b"1", b"1.0"),
    "stop": (b"[]", b'""'),
    "echo": (b"false",),
    "logprobs": (b"false",),
    "best_of": (b"1",),
    "tools": (b"[]",),
    "add_generation_prompt": (b"true",),
    "continue_final_message": (b"false",),
    "parallel_tool_calls": (b"true", b"false"),
}
"""Values that change nothing."""
_ALSO_NEUTRAL: Mapping[str, tuple[bytes, ...]] = {
    "bad_words": (b"[]",),
    "include_reasoning": (b"true",),
    "response_format": (b'{"type":"text"}', b'{"type": "text"}'),
    "return_tokens_as_token_ids": (b"false",),
    "tool_choice": (b'"none"',),
    "top_logprobs": (b"0",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (b"false",),
}
_FREE = frozenset(
    {*SAME_IN_COMPLETIONS, *PROMPT_ONLY, "stop", "include_stop_str_in_output", "seed"}
    | {"truncate_prompt_tokens", "truncation_side"}  # the prompt's ids are the truncated ones
)
"""Fields with any value. The other ones must be neutral."""
_SENT = frozenset(SAME_IN_COMPLETIONS) - {"model", "min_tokens"} | {
    "stop",
    "include_stop_str_in_output",
    "stream_options",
    *PENALTIES,
}
"""Fields that are sent again."""
_MAX_STOPS, _MAX_STOP = 64, 1024
"""Stop strings, and characters of one: all beginnings of all of them are compared where a stream is
cut.
"""


class NotContinued(Enum):
    """Why nobody goes on with a stream. The value is a label of
    `pdproxy_continuations_total{reason}`.
    """

    N = "n"
    BEAM = "beam"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    LOGPROBS = "logprobs"
    MEDIA = "media"
    GRAMMAR = "grammar"
    PENALTY = "penalty"
    BAD_WORDS = "bad_words"
    THINKING_BUDGET = "thinking_budget"
    REPETITION_DETECTION = "repetition_detection"
    SEED = "seed"
    SAMPLED = "sampled"
    HIDDEN_REASONING = "hidden_reasoning"
    REASONING_SEEN = "reasoning_seen"
    TOOLS = "tools"
    STOP_PENDING = "stop_pending"
    HALF_LETTER = "half_letter"
    NO_IDS = "no_ids"
    DERENDER = "derender"
    TOO_LONG = "too_long"
    MEMORY = "memory"
    UNKNOWN_FIELD = "unknown_field"
    NO_LIMIT = "no_limit"
    NONE_LEFT = "none_left"
    RETRY_BUDGET = "retry_budget"
    ENGINES_LOST = "engines_lost"
    DEADLINE = "deadline"
    NO_ENGINE = "no_engine"
    REFUSED = "refused"
    ROUTE = "route"


_BY_ALONE = {
    Alone.N: NotContinued.N,
    Alone.ECHO: NotContinued.ECHO,
    Alone.PROMPT_LOGPROBS: NotContinued.PROMPT_LOGPROBS,
    Alone.BEAM_SEARCH: NotContinued.BEAM,
    Alone.NON_TEXT: NotContinued.MEDIA,
}
_BY_FIELD = {
    "logprobs": NotContinued.LOGPROBS,
    "top_logprobs": NotContinued.LOGPROBS,
    "response_format": NotContinued.GRAMMAR,
    "structured_outputs": NotContinued.GRAMMAR,
    "frequency_penalty": NotContinued.PENALTY,
    "presence_penalty": NotContinued.PENALTY,
    "repetition_penalty": NotContinued.PENALTY,
    "bad_words": NotContinued.BAD_WORDS,
    "thinking_token_budget": NotContinued.THINKING_BUDGET,
    "repetition_detection": NotContinued.REPETITION_DETECTION,
    "tools": NotContinued.TOOLS,
    "tool_choice": NotContinued.TOOLS,
}


class Continuable(msgspec.Struct, frozen=True):
    """What is kept of a request so that another engine can go on with its answer. It refers to
    nothing of the body.

    `sampling`: the fields that are sent again, as a JSON object. `limit`: tokens that the answer
    may have, None: as many as fit into the context. `stops`: stop strings; `shows_stop`: whether
    they are a part of the answer. `shows_ids`: whether the client gets the token ids.
    `calls_tools`: a parser looks for calls in the answer. `ignores_eos`: end tokens may be in the
    middle of the answer.
    """

    route: Route
    model: str | None
    sampling: bytes
    limit: int | None
    min_tokens: int
    stops: tuple[str, ...]
    shows_stop: bool
    wants_usage: bool
    shows_ids: bool = False
    calls_tools: bool = False
    ignores_eos: bool = False

    @property
    def held_back(self) -> int:
        """Characters that an engine holds back at the end of the text so far: they may begin a stop
        string.
        """
        return max(map(len, self.stops)) - 1 if self.stops and not self.shows_stop else 0


_int_decoder: msgspec.json.Decoder[int | None] = msgspec.json.Decoder(int | None)
_number_decoder = msgspec.json.Decoder(float | None)
_bool_decoder = msgspec.json.Decoder(bool | None)
_stops_decoder = msgspec.json.Decoder(str | list[str] | None)


def plan(parsed: Parsed, *, sampled: bool) -> Continuable | NotContinued:
    """Return what must be kept so that another engine can go on with a request's stream, or why
    none can.

    `sampled`: whether that is wanted for answers that are drawn by chance, which then are not those
    of one engine.
    """
    if not parsed.route.form.returns_ids:
        return NotContinued.ROUTE
    if parsed.has_media:
        return NotContinued.MEDIA
    shown = shows_ids(parsed)
    if not shown and not parsed.adds_ids:
        return _why_no_ids(parsed)
    fields = parsed.fields
    sent: Fields = {}
    for name, value in fields.items():
        if name in _SENT:
            sent[name] = value
        if name in _FREE or (name == "tools" and parsed.derenders):
            continue
        text = bytes(value)
        if name == "tool_choice" and text == b'"auto"' and parsed.derenders:
            continue
        if (
            text != b"null"
            and text not in NEUTRAL.get(name, ())
            and text not in _ALSO_NEUTRAL.get(name, ())
        ):
            return _BY_FIELD.get(name, NotContinued.UNKNOWN_FIELD)
    try:
        temperature = (
            _number_decoder.decode(fields["temperature"]) if "temperature" in fields else None
        )
        if temperature is None or temperature > 0:  # vLLM makes 0.01 of all between 0 and that
            if not is_absent(fields, "seed"):
                return NotContinued.SEED
            if not sampled:
                return NotContinued.SAMPLED
        min_tokens = (
            (_int_decoder.decode(fields["min_tokens"]) or 0) if "min_tokens" in fields else 0
        )
        stops = _stops(fields)
        limit = limit_of(parsed)
        shows_stop = "include_stop_str_in_output" in fields and bool(
            _bool_decoder.decode(fields["include_stop_str_in_output"])
        )
    except msgspec.MsgspecError:
        return NotContinued.UNKNOWN_FIELD
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP for stop in stops):
        return NotContinued.UNKNOWN_FIELD
    if limit is None and parsed.route is Route.COMPLETIONS:
        return NotContinued.NO_LIMIT
    return Continuable(
        parsed.route,
        parsed.model,
        msgspec.json.encode(sent),
        limit,
        min_tokens,
        stops,
        shows_stop,
        parsed.wants_usage,
        shown,
        parsed.derenders,
        "ignore_eos" in fields and not has_value(fields, "ignore_eos", b"false"),
    )


def shows_ids(parsed: Parsed) -> bool:
    """Return whether a client asked for the token ids of a stream that engines are asked for ids of
    without that, too.
    """
    asked = has_value(parsed.fields, "return_token_ids", b"true")
    return (
        asked
        and parsed.stream
        and parsed.alone is None
        and not parsed.starts_in_silence
        and "tools" not in parsed.fields
    )


def _stops(fields: Fields) -> tuple[str, ...]:
    if "stop" not in fields:
        return ()
    found = _stops_decoder.decode(fields["stop"])
    if found is None:
        return ()
    return tuple(one for one in ((found,) if isinstance(found, str) else found) if one)


def _why_no_ids(parsed: Parsed) -> NotContinued:
    """Return why an engine is not asked for the ids of an answer that nobody else sees."""
    if parsed.alone is not None:
        return _BY_ALONE.get(parsed.alone, NotContinued.NO_IDS)
    if "tools" in parsed.fields:
        return NotContinued.TOOLS
    return (
        NotContinued.HIDDEN_REASONING
        if parsed.stream and parsed.starts_in_silence
        else NotContinued.NO_IDS
    )
