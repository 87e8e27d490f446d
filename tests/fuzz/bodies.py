"""What must hold for any bytes that come as a request's body."""

from __future__ import annotations

import json
from typing import Any

from pdproxy.kit.errors import BadRequestError
from pdproxy.transfer.bodies import alone_body
from pdproxy.transfer.contract import NO_DISPATCH, Handle, encode
from pdproxy.transfer.nixl import decode, prefill
from pdproxy.wire.errors import error_body
from pdproxy.wire.fields import NEVER_FROM_CLIENTS, body_request_id
from pdproxy.wire.lenient_json import check_content_type
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from pdproxy.wire.sent_body import joined

OURS = Handle(b'{"do_remote_prefill":true,"mark":"ours"}', b"[1,2]", 2, "id")
_PROMPT = "prompt_token_ids"
_DEEP = 300
"""Brackets of a body whose depth may come near what a parser takes: the engine's own depth of stack
then decides.
"""


def check_body(route: Route, body: bytes) -> None:
    """Assert that a body is refused in an engine's words or means on an engine what it meant
    before, without its handles.
    """
    try:
        parsed = parse(route, body)
    except BadRequestError as error:
        json.loads(error_body(error))
        assert not isinstance(_loads(body), dict) or _deep(body), "what an engine takes was refused"
        return
    value = _loads(body)
    readable = isinstance(value, dict) or _only_shadowed_numbers(parsed, body)
    assert readable or parsed.alone is not None or _refused_first(parsed, body), (
        "split, but unreadable"
    )
    if isinstance(value, dict):
        expected = _without_handles(route, value)
        out = _loads(encode(parsed.fields))
        assert isinstance(out, dict) or _deep(body), "what was taken is no JSON any more"
        if isinstance(out, dict):
            assert _same(_as_read(out), _as_read(expected)), "an engine would read something else"
    body_request_id(parsed.fields)
    bodies = [joined(alone_body(parsed, None))]
    for prompt in parsed.prompts:
        bodies.append(joined(alone_body(parsed, prompt)))
        asked, given = (
            prefill(parsed, prompt, NO_DISPATCH).body,
            decode(parsed, prompt, OURS, NO_DISPATCH).body,
        )
        _assert_only_ours(asked)
        _assert_only_ours(given)
        if isinstance(_loads(asked), dict) and not _deep(body):
            assert isinstance(_loads(given), dict), "a prefill would have been for nothing"
    for one in bodies:
        found = _loads(one)
        if isinstance(found, dict):
            assert not list(_handles(found)), "a client's handle would reach an engine"


def check_content_types(kind: bytes, body: bytes) -> None:
    """Assert that any content type is taken or refused, and refused unless it is vLLM's."""
    text = kind.decode("latin-1")
    try:
        check_content_type(text, body)
    except BadRequestError as error:
        json.loads(error_body(error))
    else:
        assert text.lower().split(";")[0] == "application/json"


def _refused_first(parsed: Any, body: bytes) -> bool:
    """Whether a prefill engine would refuse each of a request's legs, before anything has
    worked.
    """
    return _deep(body) or all(
        _loads(prefill(parsed, prompt, NO_DISPATCH).body) is None for prompt in parsed.prompts[:1]
    )


def _only_shadowed_numbers(parsed: Any, body: bytes) -> bool:
    """Whether all that Python can't read is numbers of thousands of digits whose key comes again:
    the last one counts.
    """
    try:
        json.loads(body, parse_int=len)
    except (ValueError, RecursionError):
        return False
    return isinstance(_loads(encode(parsed.fields)), dict)


def _loads(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _deep(body: bytes) -> bool:
    return body.count(b"[") + body.count(b"{") > _DEEP


def _as_read(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the numbers of some fields as engines read them: 1.0 as 1, 0 as false."""
    booleans = ("stream", "echo", "use_beam_search", "return_token_ids", "return_prompt_text")
    read = dict(body)
    for name, value in body.items():
        if name in booleans and isinstance(value, int | float) and value in (0, 1):
            read[name] = bool(value)
        is_integer = name in ("n", "prompt_logprobs", "top_logprobs") or name.endswith("_tokens")
        if is_integer and isinstance(value, float) and value.is_integer():
            read[name] = int(value)
    return read


def _same(one: object, two: object) -> bool:
    try:
        return json.dumps(one) == json.dumps(two)  # NaN equals itself here
    except RecursionError:
        return True


def _without_handles(route: Route, value: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: item
        for name, item in value.items()
        if name not in NEVER_FROM_CLIENTS and _writable(name)
    }
    if isinstance(kept.get("vllm_xargs"), dict):
        kept["vllm_xargs"] = _dropped(kept["vllm_xargs"])
    sampling = kept.get("sampling_params")
    if isinstance(sampling, dict) and isinstance(sampling.get("extra_args"), dict):
        kept["sampling_params"] = {**sampling, "extra_args": _dropped(sampling["extra_args"])}
    params = value.get("kv_transfer_params")
    if (
        route is Route.CHAT
        and isinstance(params, dict)
        and params.get("prompt_token_ids") is not None
    ):
        kept["kv_transfer_params"] = {"prompt_token_ids": params["prompt_token_ids"]}
    return kept


def _dropped(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name not in NEVER_FROM_CLIENTS}


def _writable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _handles(value: dict[str, Any]) -> Any:
    """Yield the handles at every place where vLLM's requests could carry one. A prompt in the place
    of one is none.
    """
    sampling = value.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    for carrier in (value, value.get("vllm_xargs"), extra):
        if isinstance(carrier, dict):
            found = [carrier[name] for name in NEVER_FROM_CLIENTS if name in carrier]
            prompt = (
                carrier is value
                and len(found) == 1
                and isinstance(found[0], dict)
                and [*found[0]] == [_PROMPT]
            )
            yield from () if prompt else found


def _assert_only_ours(body: bytes) -> None:
    found = _loads(body)
    if isinstance(found, dict):
        handles = list(_handles(found))
        assert len(handles) == 1
        assert handles[0].get("mark") == "ours" or handles[0].get("do_remote_decode") is True
        assert "made-up" not in json.dumps(handles[0])
