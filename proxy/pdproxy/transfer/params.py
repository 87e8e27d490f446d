"""`kv_transfer_params` put together for engines that vllm-omni's rules describe: what each leg says, and which source wins.

Source: vllm-omni's `pd_utils` (its PR 1303). Lowest first: what the client sent (None unless a setting trusts clients with
it), what P answered, and last the flags that say who prefills, which nobody overrides. Pure; nothing that is passed in changes.
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
    """Return what P is told: `given` below the flags and the transfer's name, which are ours.

    Raises:
        NotAMappingError: `given` is neither None nor anything with names and values.
    """
    return {**(as_mapping(given) or {}), **_TO_PREFILL, "transfer_id": transfer_id(request_id)}


def decode_params(
    request_id: str, given: object = None, answered: object = None, bootstrap: str | None = None
) -> Params:
    """Return what D is told: `given`, above it what P `answered`, above both the flags.

    `bootstrap` is the address of P's bootstrap server as the settings know it: it fills in where `given` names none, and
    P's own word is stronger. A transfer that nobody named, or named by nothing, gets this request's name.

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
    """Params that P answered and D was not yet told, by request. Whoever waits for both legs at once keeps them here.

    At most `most` requests: beyond that the oldest is forgotten, so that a path that drops nothing can't fill the memory.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._by_request: dict[str, Params] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def hold(self, request_id: str, answered: object) -> None:
        """Keep what P answered, in place of what is kept; nothing, if it answered None.

        Raises:
            NotAMappingError: it can't be read.
        """
        params = as_mapping(answered)
        if params is None:
            return
        self._by_request.pop(request_id, None)
        self._by_request[request_id] = params
        if len(self._by_request) > self._most:
            del self._by_request[next(iter(self._by_request))]

    def pop(self, request_id: str, fallback: object = None) -> Params | None:
        """Return the params that belong to a request, and keep them no longer.

        `fallback` is what came with the answer itself: newer than what is kept, and taken in its place if it says anything.

        Raises:
            NotAMappingError: `fallback` can't be read; what is kept is gone all the same.
        """
        kept = self._by_request.pop(request_id, None)
        said = as_mapping(fallback)
        return kept if said is None else said

    def drop(self, request_id: str) -> None:
        """Forget a request. One that is not known changes nothing."""
        self._by_request.pop(request_id, None)
