"""Compares the token ids that a prefill engine really serves with those that are made here.

Owns how often a prefill engine tokenizes a prompt by itself although its ids are known. Canaries
only use `/tokenize`, but an engine's generating routes may make other ids (vLLM 0.32.0 renders
chats of gpt-oss by another library there, and by the template in `/tokenize`). So an engine is sent
ids only after one of its answers has shown the same ids, and is checked again from time to time.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdproxy.fleet.engine import PromptKind
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.tokens.ids import TokenIds
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route

EVERY = 100
"""The engine tokenizes one of so many prompts by itself, for the check: a hundredth of the work
without ids.
"""

_ids_decoder = msgspec.json.Decoder(list[int])


class Refuted(Protocol):
    """Is called when an engine makes other ids: `fleet.canary.Canaries`."""

    def refuted(self, url: str, model: str | None, route: Route, why: str) -> None:
        """Stop sending ids of this model."""


class TokenizerCheck:
    """Decides which ids a prefill engine is sent, and checks its answers: per run, model, route,
    and with or without tools.
    """

    def __init__(self, engines: EngineRegistry, refuted: Refuted) -> None:
        self._engines = engines
        self._refuted = refuted

    def __repr__(self) -> str:
        count = sum(len(engine.run.proven) for engine in self._engines.values())
        return f"<TokenizerCheck of {count} kinds of prompts>"

    def sent(self, url: str, parsed: Parsed, ids: TokenIds | None) -> TokenIds | None:
        """Return the ids that an engine is sent, None if it has to make them itself."""
        if ids is None or (engine := self._engines.known.get(url)) is None:
            return None
        kind, proven = _kind(parsed), engine.run.proven
        count = proven.get(kind, 0)
        if count == 0:
            return None
        proven[kind] = count + 1
        return None if count % EVERY == 0 else ids

    def served(
        self,
        url: str,
        parsed: Parsed,
        ids: TokenIds | None,
        sent: TokenIds | None,
        served: bytes | None,
    ) -> None:
        """Check a prompt that an engine has prefilled. `served`: its ids in the engine's answer, a
        JSON array.
        """
        if (
            ids is None
            or sent is not None
            or served is None
            or (engine := self._engines.known.get(url)) is None
        ):
            return
        kind, proven = _kind(parsed), engine.run.proven
        if served == ids.json or _same(served, ids):
            proven.setdefault(kind, 1)
            return
        proven.pop(kind, None)
        what = "chats" if parsed.route is Route.CHAT else "completions"
        why = (
            f"it served other token ids than ours for a request, though its /tokenize agreed: "
            f"{what} are left to the engines"
        )
        self._refuted.refuted(url, parsed.model, parsed.route, why)


def _kind(parsed: Parsed) -> PromptKind:
    return parsed.model, parsed.route, "tools" in parsed.fields


def _same(served: bytes, ids: TokenIds) -> bool:
    try:
        return _ids_decoder.decode(served) == ids.numbers()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
