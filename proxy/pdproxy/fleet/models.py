"""The answer to `GET /v1/models`: the models of all engines that can serve by themselves, each
listed once.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.errors import EngineError, OverloadedError, RefusalReason
from pdproxy.upstream.admin import EngineAdmin


class _ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[msgspec.Raw]


class _ModelName(msgspec.Struct):
    id: str


Cards = dict[str, msgspec.Raw]
"""Models by their names, as engines describe them."""


async def cards_of(
    engines: EngineRegistry,
    admin: EngineAdmin,
    now: Callable[[], float],
    authorization: bytes | None,
    *,
    own_keys: bool,
) -> Cards:
    """Return the models of all engines of a pool that can serve by themselves, each once.

    `own_keys`: clients send keys of the proxy, so engines are asked with the proxy's key; else with
    the client's `authorization`.

    Raises:
        OverloadedError: no engine is up.
        EngineError: no engine that is up gave a list that can be read.
    """
    own = None if own_keys else (authorization or b"").decode("latin-1")
    cards: Cards = {}
    failed: EngineError | None = None
    at = now()
    for url, engine in list(engines.items()):
        ledger_engine = engine.in_ledger
        if (
            ledger_engine.for_others
            or not ledger_engine.usable(at)
            or ledger_engine.evidence is None
        ):
            continue
        if ledger_engine.evidence.models <= cards.keys():
            continue
        try:
            listed = msgspec.json.decode(await admin.models_body(url, own), type=_ModelList)
            named = [(msgspec.json.decode(card, type=_ModelName).id, card) for card in listed.data]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            failed = EngineError(f"{url}: /v1/models answered something else: {error}")
            continue
        except EngineError as error:
            failed = error
            continue
        for name, card in named:
            cards.setdefault(name, card)
    if not cards:
        raise failed or OverloadedError("no engine is up: see /ready", RefusalReason.NO_ENGINE)
    return cards


def page(cards: Cards) -> bytes:
    """Return the answer that lists models."""
    return msgspec.json.encode(_ModelList(data=list(cards.values())))


def alias_card(name: str, card: msgspec.Raw) -> msgspec.Raw:
    """Return the card of another name for a model: the model's card with this name, the model as
    root, and no parent.
    """
    fields = msgspec.json.decode(card, type=dict[str, msgspec.Raw])
    fields |= {
        "id": msgspec.Raw(msgspec.json.encode(name)),
        "root": fields["id"],
        "parent": msgspec.Raw(b"null"),
    }
    return msgspec.Raw(msgspec.json.encode(fields))
