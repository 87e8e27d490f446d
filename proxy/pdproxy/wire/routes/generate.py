"""`/inference/v1/generate`: token ids in, token ids (or text) out. Engines have it with
`--enable-scale-out`.

Both legs have the client's ids: no template and no tokenizer can differ. Limits and all that is
asked of the answer stand in `sampling_params`. Source: vLLM 0.32.0
`entrypoints/scale_out/token_in_token_out`.
"""

from __future__ import annotations

import msgspec

from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.fields import Fields, inner_fields, is_absent, read_field
from pdproxy.wire.plain_numbers import make_plain
from pdproxy.wire.route_form import Alone, Reading, RouteForm
from pdproxy.wire.routes import openai
from pdproxy.wire.unusual import UnusualError

_PARAMS = "sampling_params"
_MEDIA = ("features", "content_parts")
_OF_PROMPT = ("prompt_logprobs", "prompt_logprob_token_ids")
_NOT_ON_PREFILL = ("stream_options", "return_token_ids")
_PARAMS_NOT_ON_PREFILL = ("logprobs", "logprob_token_ids", "flat_logprobs", "structured_outputs")
_ONE, _FALSE = msgspec.Raw(b"1"), msgspec.Raw(b"false")
_TOKENS = msgspec.Raw(b'"tokens"')
_int_decoder = msgspec.json.Decoder(int | None)
_bool_decoder = msgspec.json.Decoder(bool | None)


def read(fields: Fields, _bounds: Bounds) -> Reading:
    """Read a body: see `route_form.Read`."""
    params = inner_fields(fields, _PARAMS)
    if params is None or "token_ids" not in fields:
        raise UnusualError
    make_plain(params)
    fields[_PARAMS] = msgspec.Raw(msgspec.json.encode(params))
    prompts = (openai.ids(fields["token_ids"]),)
    if not all(is_absent(fields, name) for name in _MEDIA):
        return Reading(prompts, Alone.NON_TEXT)
    limit = read_field(params, "max_tokens", _int_decoder)
    least = read_field(params, "min_tokens", _int_decoder) or 0
    read_field(fields, "return_token_ids", _bool_decoder)
    if least < 0 or (limit is not None and limit < max(1, least)):
        raise UnusualError  # every engine refuses it: a prefill would be wasted
    if not all(is_absent(params, name) for name in _OF_PROMPT):
        return Reading(prompts, Alone.PROMPT_LOGPROBS)
    if not is_absent(params, "skip_reading_prefix_cache"):
        return Reading(prompts, Alone.UNUSUAL)  # a decode engine would load nothing
    return Reading(prompts, Alone.N if openai.wants_several(params) else None)


def prefill(fields: Fields) -> None:
    """Make the fields those of a prefill leg: one token, not streamed."""
    for name in _NOT_ON_PREFILL:
        fields.pop(name, None)
    params = inner_fields(fields, _PARAMS) or {}
    for name in _PARAMS_NOT_ON_PREFILL:
        params.pop(name, None)
    params["max_tokens"] = _ONE
    if "n" in params:
        params["n"] = _ONE
    openai.least_tokens(params)
    fields[_PARAMS] = msgspec.Raw(msgspec.json.encode(params))
    fields["output_mode"] = _TOKENS
    fields["stream"] = _FALSE


FORM = RouteForm(
    path="/inference/v1/generate",
    read=read,
    prompt_fields=("token_ids",),
    listed={},
    asks_in=_PARAMS,
    limits=("max_tokens",),
    answers=("n",),
    unseen=("stream_options",),
    has_priority_header=False,
    keeps_prompt_ids=False,
    prefill=prefill,
    returns_ids=False,
    takes_ids=False,
    frees_refused=False,
)
