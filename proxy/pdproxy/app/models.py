"""The answer to `GET /v1/models`: what the engines that can serve by themselves say of their models, each once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.kit.errors import EngineError, OverloadedError
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Role
from pdproxy.upstream.admin import EngineAdmin


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]
    object: str = "list"


class _ModelName(msgspec.Struct):
    id: str


async def models(
    ledger: Ledger, admin: EngineAdmin, now: Callable[[], float], authorization: bytes | None, *, own_keys: bool
) -> bytes:
    """Return the models of all engines that can serve by themselves, each once, in the engines' own words.

    Asked with the client's own key, or with ours for clients that brought a key of ours.
    """
    own = None if own_keys else (authorization or b"").decode("latin-1")
    cards: dict[str, msgspec.Raw] = {}
    failed: EngineError | None = None
    asked = now()
    for node in ledger.nodes:
        if (
            node.role is Role.PREFILL
            or not node.usable(asked)
            or node.evidence is None
            or node.evidence.models <= set(cards)
        ):
            continue
        try:
            listed = msgspec.json.decode(await admin.models_body(node.url, own), type=_ModelList)
            named = [(msgspec.json.decode(card, type=_ModelName).id, card) for card in listed.data]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            failed = EngineError(f"{node.url}: /v1/models answered something else: {error}")
            continue
        except EngineError as error:
            failed = error
            continue
        for name, card in named:
            cards.setdefault(name, card)
    if not cards:
        raise failed or OverloadedError("no engine is up: see /ready")
    return msgspec.json.encode(_ModelList(data=list(cards.values())))
