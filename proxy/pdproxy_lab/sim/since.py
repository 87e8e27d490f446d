"""Since which version of vLLM engines do what. Where no rule here says otherwise, the simulator
does as 0.32.0 does.
"""

from __future__ import annotations

import re
from functools import cache

from pdproxy_lab.sim.request import EngineDeadError

_MESSAGE_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_NUMBER = re.compile(r"\d+")


@cache
def v033(version: str) -> bool:
    """Return whether a version has what 0.33.0 has changed.

    - Choices have `weight_versions`. Events have `kv_transfer_params`: those of a choice's last
      event are a handle.
    - A NIXL handle has `remote_registration_generation`.
    - A Responses stream that is cut by its length ends with `response.incomplete`, and so does its
      last item.
    - The error of a dead core has another text, and so has that of an empty list of prompts. Errors
      in a chat's stream have no spaces in their JSON.
    - Errors of messages have Anthropic's types. A message's stream that fails closes its open block
      first, and tells what failed; so does one of Cohere's chat.
    - Responses read the header that names a data-parallel rank.
    """
    return tuple(int(part) for part in _NUMBER.findall(version)[:2]) >= (0, 33)


def weight_versions(version: str) -> dict[str, None]:
    """Return what a choice has of the versions of weights that sampled it, unless they are asked
    for.
    """
    return {"weight_versions": None} if v033(version) else {}


def dead_message(version: str) -> str:
    """Return the message with which an engine whose core has died answers."""
    return (
        "The server had an error while processing your request."
        if v033(version)
        else str(EngineDeadError())
    )


def message_error(version: str, kind: str, status: int) -> str:
    """Return the type of an error of the Messages API: Anthropic's, formerly vLLM's own."""
    if not v033(version):
        return kind
    return _MESSAGE_ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")


def registration(version: str) -> dict[str, int]:
    """Return what a NIXL handle says of the engine's KV memory: how often it was registered. An
    engine that slept counts on.
    """
    return {"remote_registration_generation": 1} if v033(version) else {}
