"""Which prompts decode engines may serve whole: `pools[].alone`.

A decode engine computes a prompt between the tokens of its streams, which wait for it. Engines of
other roles are not asked about: those that serve whole are there for it.
"""

from __future__ import annotations

from pdproxy.kit.errors import OverloadedError, RefusalReason
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.wire.route_form import Alone

BYTES_PER_TOKEN = 4
"""Assumed for a prompt whose tokens are not known."""
_ALWAYS = frozenset({Alone.SHORT_PROMPT, Alone.PREFILL_REFUSED})
"""A short prompt takes no time. One that a prefill engine has refused would be refused again: only
the answer to the client's own request can say what is wrong with that.
"""


def spares_decode(resources: ExchangeResources, request: PromptRequest, why: Alone | None) -> bool:
    """Return whether no engine of role decode may serve a prompt whole. `why`: it can't be split,
    None if it can.
    """
    most = resources.states.alone_up_to
    return most is not None and why not in _ALWAYS and _tokens(request) > most


def refusal(
    resources: ExchangeResources, request: PromptRequest, why: Alone
) -> OverloadedError | None:
    """Return the error of a prompt that a decode engine could serve whole, and may not; None: that
    is not what it lacks.
    """
    states = resources.states
    if not spares_decode(resources, request, why) or not states.decodes(request.parsed.model):
        return None
    most = f"up to {states.alone_up_to} tokens" if states.alone_up_to else "never"
    text = (
        f"this prompt can't be split now ({why.value}), and a decode engine may not serve it "
        f"whole: pools[].alone is {most}"
    )
    return OverloadedError(text, RefusalReason.ALONE)


def known_tokens(request: PromptRequest) -> int | None:
    """Return how many tokens a prompt has, None while that is not known."""
    if request.ids is not None:
        return request.ids.count
    return None if request.prompt is None else request.prompt.tokens


def _tokens(request: PromptRequest) -> int:
    known = known_tokens(request)
    if known is not None:
        return known
    size = request.parsed.body_bytes if request.prompt is None else request.prompt.text_bytes
    return size // BYTES_PER_TOKEN
