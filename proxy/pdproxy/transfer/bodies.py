"""The parts of the legs' bodies that all contracts share. What a route's legs send is in
`wire.routes`.
"""

from __future__ import annotations

from msgspec import structs

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.contract import Dispatch, encode, raw
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt, RouteForm
from pdproxy.wire.sent_body import SentBody, params_with_ids, sent_body

_TRUE = raw(b"true")
_USAGE_AT_THE_END = raw(b'{"include_usage":true,"continuous_usage_stats":false}')


def prefill_fields(parsed: Parsed, prompt: Prompt, dispatch: Dispatch | None = None) -> Fields:
    """Return the fields of a prefill leg: one token, not streamed, with the prompt's ids where the
    route's answers have them and something uses them. The client's fields do not change.

    `dispatch`: None where the contract's legs carry no ids.
    """
    fields = dict(parsed.fields)
    form = parsed.route.form
    if form.both is not None:
        form.both(fields)
    form.prefill(fields)
    _set_prompt(fields, form, prompt)
    if dispatch is None or not _uses_ids(parsed, dispatch):
        fields.pop("return_token_ids", None)
    return fields


def _uses_ids(parsed: Parsed, dispatch: Dispatch) -> bool:
    """Return whether a prefill engine's ids are of use. Both engines make the same ids of a text,
    but may render a chat in different ways.
    """
    is_text = parsed.route is Route.COMPLETIONS
    return not is_text or dispatch.ids is not None or dispatch.compares_ids


def decode_fields(parsed: Parsed, prompt: Prompt) -> Fields:
    """Return the fields of a decode leg: the client's, and for the proxy itself the usage and the
    token ids that it needs.
    """
    fields = dict(parsed.fields)
    form = parsed.route.form
    _set_prompt(fields, form, prompt)
    if form.both is not None:
        form.both(fields)
    if parsed.adds_usage:
        fields["stream_options"] = _USAGE_AT_THE_END
    if parsed.adds_ids:
        fields["return_token_ids"] = _TRUE
    return fields


def loading(parsed: Parsed) -> Parsed:
    """Return the request by which a decode engine loads a prompt's KV before it gets the client's
    own request: as a prefill leg's, for one token.
    """
    fields = dict(parsed.fields)
    parsed.route.form.prefill(fields)
    fields.pop("return_token_ids", None)
    return structs.replace(parsed, fields=fields, stream=False, alone=None)


def added_fields(parsed: Parsed) -> set[str]:
    """Return the fields of a decode leg, or of a body for one engine alone, that are not the
    client's.
    """
    added = {"kv_transfer_params"}
    if parsed.adds_usage:
        added.add("stream_options")
    if parsed.adds_ids:
        added.add("return_token_ids")
    return added - parsed.fields.keys()


def alone_body(parsed: Parsed, prompt: Prompt | None) -> SentBody:
    """Return the body for one engine that serves the request, or one of its prompts, without KV
    transfer.
    """
    if prompt is None:  # the whole request as it was received
        fields = dict(parsed.fields)
        if parsed.adds_usage:
            fields["stream_options"] = _USAGE_AT_THE_END
        return sent_body(fields, parsed.body_bytes)
    return sent_body(decode_fields(parsed, prompt), parsed.body_bytes)


def with_ids(fields: Fields, route: Route, ids: TokenIds) -> None:
    """Add a prompt's ids, so that an engine need not tokenize it. A chat keeps its messages: they
    are still validated.

    Source: vLLM 0.32.0 `renderers/online_renderer.py`, which reads a chat's ids from
    `kv_transfer_params` of any leg.
    """
    if route is Route.COMPLETIONS:
        fields["prompt"] = raw(ids.json)
        return
    fields["kv_transfer_params"] = raw(
        params_with_ids(bytes(fields["kv_transfer_params"]), ids.json)
    )


def until_length(fields: Fields, form: RouteForm) -> Fields:
    """Return a prefill leg's fields so that its one token ends it by length: see
    `Capabilities.needs_length`.

    `min_tokens` 1 masks EOS and the model's own stop ids. On routes without that field these end
    the leg otherwise.
    """
    asked = form.asked(fields) | dict.fromkeys(form.stops, raw(b"[]"))
    if form.has_min_tokens:
        asked |= {"include_stop_str_in_output": raw(b"false"), "min_tokens": raw(b"1")}
    return asked if form.asks_in is None else fields | {form.asks_in: raw(encode(asked))}


def _set_prompt(fields: Fields, form: RouteForm, prompt: Prompt) -> None:
    if prompt.raw is not None:
        fields[form.prompt_fields[0]] = prompt.raw
