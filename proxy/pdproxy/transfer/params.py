"""Makes the `kv_transfer_params` of each leg by vllm-omni's rules, from several sources.

Source: vllm-omni's `pd_utils` (its PR 1303). A later source overrides an earlier one: what the client sent (None unless a setting
allows it), what P answered, and the flags that state who prefills. Pure; arguments are not changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdproxy.transfer.contract import raw
from pdproxy.transfer.mappings import as_mapping
from pdproxy.wire.fields import Fields

Params = dict[str, Any]

_TO_PREFILL: Params = {"do_remote_decode": True, "do_remote_prefill": False}
_TO_DECODE: Params = {"do_remote_decode": False, "do_remote_prefill": True}


def transfer_id(request_id: str) -> str:
    """Return the name by which P and D know one transfer."""
    return f"xfer-{request_id}"


def prefill_params(request_id: str, given: object = None) -> Params:
    """Return P's params: `given`, overridden by the flags and the transfer's name.

    Raises:
        NotAMappingError: `given` is neither None nor anything with names and values.
    """
    return {**(as_mapping(given) or {}), **_TO_PREFILL, "transfer_id": transfer_id(request_id)}


def decode_params(
    request_id: str, given: object = None, answered: object = None, bootstrap: str | None = None
) -> Params:
    """Return D's params: `given`, overridden by what P `answered`, overridden by the flags.

    `bootstrap`: the address of P's bootstrap server by the settings. It is used if neither `given` nor `answered` has one. A
    transfer without a name, or with an empty one, gets the name that belongs to this request.

    Raises:
        NotAMappingError: `given` or `answered` is neither None nor anything with names and values.
    """
    params = {"transfer_id": transfer_id(request_id), **(as_mapping(given) or {})}
    if bootstrap is not None:
        params.setdefault("remote_bootstrap_addr", bootstrap)
    params |= as_mapping(answered) or {}
    params |= _TO_DECODE
    params["transfer_id"] = params["transfer_id"] or transfer_id(request_id)
    return params


def first(outputs: Iterable[object]) -> Params | None:
    """Return the first of several answers' params, None if no answer has any.

    Raises:
        NotAMappingError: that one can't be read.
    """
    return next((as_mapping(one) for one in outputs if one is not None), None)


def until_length(fields: Fields) -> Fields:
    """Return a prefill leg's fields so that its one token ends it by length, whatever token it is.

    Mooncake and MoRIIO keep the blocks of a request that ended by length alone. `min_tokens` 1 masks EOS and the model's own
    stop ids.
    """
    return {
        **fields,
        "stop": raw(b"[]"),
        "stop_token_ids": raw(b"[]"),
        "include_stop_str_in_output": raw(b"false"),
        "min_tokens": raw(b"1"),
    }


class Held:
    """Params that P has answered and D was not sent yet, by request. For callers that wait for both legs at once.

    Beyond `max_requests`, the oldest is forgotten: a caller that drops nothing must not fill the memory.
    """

    def __init__(self, max_requests: int = 65_536) -> None:
        self._by_request: dict[str, Params] = {}
        self._max_requests = max_requests

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def hold(self, request_id: str, answered: object) -> None:
        """Keep what P answered, and replace what is kept. None changes nothing.

        Raises:
            NotAMappingError: it can't be read.
        """
        params = as_mapping(answered)
        if params is None:
            return
        self._by_request.pop(request_id, None)
        self._by_request[request_id] = params
        if len(self._by_request) > self._max_requests:
            del self._by_request[next(iter(self._by_request))]

    def pop(self, request_id: str, fallback: object = None) -> Params | None:
        """Return the params that belong to a request, and keep them no longer.

        `fallback` is what came with the answer itself. It is newer, and returned instead of what is kept unless it is None.

        Raises:
            NotAMappingError: `fallback` can't be read; what is kept is dropped nevertheless.
        """
        kept = self._by_request.pop(request_id, None)
        newer = as_mapping(fallback)
        return kept if newer is None else newer

    def drop(self, request_id: str) -> None:
        """Forget a request. An unknown request changes nothing."""
        self._by_request.pop(request_id, None)
