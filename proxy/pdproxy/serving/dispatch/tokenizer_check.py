"""Proofs: what an engine really serves, compared with the ids that are made here.

Owns how often a prefill engine is left to tokenize by itself although its prompt's ids are known. Canaries ask `/tokenize`, and
an engine's generating routes may go other ways (vLLM 0.32.0 renders chats of gpt-oss by a library of its own there, and by the
template in `/tokenize`). So an engine gets ids only after an answer of its own has shown the same, and not now and then again.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdproxy.scheduling.ledger import Ledger
from pdproxy.tokens.ids import TokenIds
from pdproxy.wire.request import Parsed, Route

EVERY = 100
"""Of an engine's prompts, one in so many is a proof: a hundredth of its tokenizing is what certainty costs."""

_Kind = tuple[tuple[str, int], str | None, Route, bool]
_ids_decoder = msgspec.json.Decoder(list[int])


class Refuted(Protocol):
    """Hears of an engine that makes other ids: `fleet.canary.Canaries`."""

    def refuted(self, url: str, model: str | None, route: Route, why: str) -> None:
        """Take note."""


class TokenizerCheck:
    """Says what a prefill engine is sent, and looks at what it answers: by life, model and route, with tools and without."""

    def __init__(self, ledger: Ledger, refuted: Refuted) -> None:
        self._ledger = ledger
        self._refuted = refuted
        self._proven: dict[_Kind, int] = {}

    def __repr__(self) -> str:
        return f"<TokenizerCheck of {len(self._proven)} kinds of prompts>"

    def sent(self, url: str, parsed: Parsed, ids: TokenIds | None) -> TokenIds | None:
        """Return the ids that an engine is to be sent, None where it is to show its own."""
        if ids is None:
            return None
        kind = self._kind(url, parsed)
        count = self._proven.get(kind, 0)
        if count == 0:
            return None
        self._proven[kind] = count + 1
        return None if count % EVERY == 0 else ids

    def served(
        self, url: str, parsed: Parsed, ids: TokenIds | None, sent: TokenIds | None, served: bytes | None
    ) -> None:
        """An engine has prefilled a prompt: `served` are the ids that it says it was, a JSON array."""
        if ids is None or sent is not None or served is None:
            return
        kind = self._kind(url, parsed)
        if served == ids.json or _same(served, ids):
            if kind not in self._proven:
                self._forget()
                self._proven[kind] = 1
            return
        self._proven.pop(kind, None)
        what = "chats" if parsed.route is Route.CHAT else "completions"
        why = f"it served other token ids than ours for a request, though its /tokenize agreed: {what} are left to the engines"
        self._refuted.refuted(url, parsed.model, parsed.route, why)

    def _kind(self, url: str, parsed: Parsed) -> _Kind:
        return self._ledger.life(url), parsed.model, parsed.route, "tools" in parsed.fields

    def _forget(self) -> None:
        """Drop lives that are over."""
        lives = {self._ledger.life(node.url) for node in self._ledger.nodes}
        self._proven = {kind: count for kind, count in self._proven.items() if kind[0] in lives}


def _same(served: bytes, ids: TokenIds) -> bool:
    try:
        return _ids_decoder.decode(served) == ids.numbers()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
