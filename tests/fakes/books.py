"""The books of KV handles: who gave out which, and what became of it, as the engines saw it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pdproxy_lab.sim.nixl_link import NixlLink

if TYPE_CHECKING:
    from tests.fakes.engine import FakeEngine


class Books:
    """One for all engines of a test. Each handle has the list of what happened to it, in order.

    `given` by a prefill engine, `asked` when a decode engine received it with a request, then
    `loaded` (its KV was pulled, or a script made data from it), `released` (a request with
    `max_tokens: 0` gave it back), `refused` (the engine's own refusal or failure gave it back) or
    `aborted` (the decode engine had accepted the request when its connection was closed).
    """

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.history: dict[str, list[str]] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.unknown: list[object] = []

    def given(self, params: dict[str, Any]) -> None:
        """A prefill engine has given out a handle."""
        handle = str(params["remote_request_id"])
        self.params[handle] = params
        self.history[handle] = ["given"]

    def note(self, params: dict[str, Any], what: str) -> None:
        """A decode engine has seen a handle. It must be one that was given out, in the engine's own
        words.
        """
        handle = str(params.get("remote_request_id"))
        sent = {name: value for name, value in params.items() if name != "prompt_token_ids"}
        if not sent:
            return  # a client's prompt, no handle
        if sent != self.params.get(handle):
            self.unknown.append(params)
            return
        self.history[handle].append(what)

    def ended(self, handle: str, what: str) -> None:
        """Something became of a handle."""
        self.history.setdefault(handle, []).append(what)

    def free(self, params: dict[str, Any]) -> None:
        """Tell the prefill engine that a handle is over, as the decode engine would have that a
        script stood in for.
        """
        for engine in self.engines:
            if engine.sim.engine.engine_id == params.get("remote_engine_id"):
                link = engine.sim.engine._links[0]
                assert isinstance(link, NixlLink)
                link.notified("release", [str(params.get("remote_request_id"))])

    def held(self) -> dict[str, float]:
        """The handles that engines still hold blocks for, with the seconds left of their leases."""
        return {
            name: left
            for engine in self.engines
            for name, left in engine.sim.engine.handles.items()
        }

    @property
    def endings(self) -> Counter[str]:
        """How many handles ended in which way; those that did not end count as `held`."""
        found: Counter[str] = Counter()
        for history in self.history.values():
            ends = [what for what in history if what not in ("given", "asked")]
            found["+".join(ends) or "held"] += 1
        return found
