"""What an operator is shown about the engines: whether requests can be served, and what is
wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdproxy.observe.slow import MOVES_NOT
from pdproxy.scheduling.compatibility import may_share, prefill_and_decode
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.transfer_faults import TransferFault


def not_ready(
    engines: Sequence[LedgerEngine], *, starting: bool, alone: Sequence[Role]
) -> str | None:
    """Return why no request could be served, None if one could.

    `starting`: every engine must have been probed once. `alone`: the roles whose engines may serve
    a request by themselves.
    """
    waiting = [engine.url for engine in engines if not engine.probed]
    if starting and waiting:
        return f"starting: not probed yet: {', '.join(waiting)}"
    if any(engine.available for engine in engines if not engine.uses.isdisjoint(alone)):
        return None
    roles = " or ".join(role.value for role in reversed(alone))
    if Role.DECODE in alone:
        down = "; ".join(
            f"{engine.url} {_why_not(engine)}"
            for engine in engines
            if not engine.uses.isdisjoint(alone)
        )
        return f"no {roles} engine is up: {down}"
    if any(_is_pair(prefill, decode) for prefill in engines for decode in engines):
        return None
    why = "; ".join(
        f"{engine.url} {_why_not(engine) or engine.kv_not_ready}"
        for engine in engines
        if not _takes_part(engine)
    )
    return f"no {roles} engine is up, and no prefill engine can be paired with a decode engine" + (
        f": {why}" if why else ""
    )


def _why_not(engine: LedgerEngine) -> str | None:
    return engine.down_because or engine.draining or engine.stalled or engine.asleep


def _takes_part(engine: LedgerEngine) -> bool:
    return engine.available and engine.kv_not_ready is None


def _is_pair(prefill: LedgerEngine, decode: LedgerEngine) -> bool:
    if (
        Role.PREFILL not in prefill.uses
        or Role.DECODE not in decode.uses
        or not (prefill.available and decode.available)
    ):
        return False
    return prefill_and_decode(prefill, decode) is None


def may_return(
    engines: Sequence[LedgerEngine], model: str | None, *, alone: Sequence[Role]
) -> bool:
    """Return whether a request could be served if the engines that stand still moved again."""
    found = [
        engine for engine in engines if engine.returns and (model is None or engine.serves(model))
    ]
    if not any(engine.stalled is not None for engine in found):
        return False
    return any(not engine.uses.isdisjoint(alone) for engine in found) or (
        any(Role.PREFILL in engine.uses for engine in found)
        and any(Role.DECODE in engine.uses for engine in found)
    )


def why_degraded(engines: Sequence[LedgerEngine], now: float) -> str | None:
    """Return why no prompt can be split now, although the pool has prefill engines; None if one can
    be, or has none.
    """
    prefills = [engine for engine in engines if Role.PREFILL in engine.uses]
    decodes = [engine for engine in engines if Role.DECODE in engine.uses and engine.usable(now)]
    usable = [engine for engine in prefills if engine.usable(now)]
    if not prefills:
        return None
    if not usable:
        return "no prefill engine can be used: every prompt is served by one engine alone"
    if not decodes:
        return "no decode engine can be used: every prompt is served by one aggregated engine alone"
    for prefill in usable:
        if any(
            decode.spec.takes_from(prefill.spec) and may_share(prefill, decode) is None
            for decode in decodes
        ):
            return None
    return (
        "no prefill engine that is up can be paired with a decode engine: every prompt is served "
        "by one engine alone"
    )


def shortcomings(engines: Sequence[LedgerEngine], now: float) -> list[str]:
    """Return what is wrong with single engines although requests are served, a sentence each."""
    found = [
        f"{engine.role.value} {engine.url}: {engine.down_because}"
        for engine in engines
        if engine.down_because
    ]
    up = [engine for engine in engines if engine.down_because is None]
    for engine in up:
        name = f"{engine.role.value} {engine.url}"
        if engine.stalled is not None:
            found.append(f"{name}: {engine.stalled}")
        elif engine.asleep is not None:
            found.append(f"{name}: {engine.asleep}")
        elif now < engine.open_until and engine.excluded_because is not None:
            found.append(
                f"{name}: {engine.excluded_because}: it is excluded for "
                f"{engine.open_until - now:.1f} s"
            )
        elif now < engine.open_until:
            found.append(
                f"{name}: failed {engine.failures} times in a row, its breaker is open for "
                f"{engine.open_until - now:.1f} s"
            )
        elif engine.half_open(now):
            found.append(f"{name}: gets one request at a time until one shows that it serves again")
    return found


def not_encoding(engines: Sequence[LedgerEngine], now: float) -> list[str]:
    """Return whether no encoder engine can be used, although there are some, in a sentence."""
    encoders = [engine for engine in engines if engine.role is Role.ENCODE]
    if not encoders or any(engine.usable(now) for engine in encoders):
        return []
    return ["no encoder engine can be used: others encode media themselves, if they can"]


def not_moving(faults: Iterable[TransferFault], now: float) -> list[str]:
    """Return between which engines KV does not move, a sentence each."""
    found = []
    for fault in faults:
        roles = [
            f"{role} {url}"
            for role, url in (("prefill", fault.prefill), ("decode", fault.decode))
            if url
        ]
        found.append(f"{' and '.join(roles)}: {MOVES_NOT.words}: {fault.tells(now)}")
    return found


def not_paired(engines: Sequence[LedgerEngine]) -> list[str]:
    """Return which engines that are up are not paired although the settings pair them, and which
    ones those leave no partner.

    A sentence each, not one for each pair: `ANY` makes n x n. Looking at all takes milliseconds for
    a hundred engines.
    """
    found = [
        f"{engine.role.value} {engine.url} shares work with no engine: sources and pair_within "
        f"leave it none"
        for engine in engines
        if _is_left_out(engine, engines)
    ]
    engines = [engine for engine in engines if engine.down_because is None]
    wrong: dict[LedgerEngine, dict[LedgerEngine, str]] = {}
    for prefill in (engine for engine in engines if Role.PREFILL in engine.uses):
        for decode in (engine for engine in engines if Role.DECODE in engine.uses):
            if decode is prefill or not decode.spec.takes_from(prefill.spec):
                continue  # the operator wants it so
            if (why := prefill_and_decode(prefill, decode)) is not None:
                wrong.setdefault(prefill, {}).setdefault(decode, why)
                wrong.setdefault(decode, {}).setdefault(prefill, why)
    while wrong:
        worst = max(wrong, key=lambda engine: (len(wrong[engine]), engine.role is not Role.PREFILL))
        others = wrong.pop(worst)
        for other in others:
            del wrong[other][worst]
            if not wrong[other]:
                del wrong[other]
        found += _sentences(worst, others)
    return found


def _is_left_out(engine: LedgerEngine, engines: Sequence[LedgerEngine]) -> bool:
    """Return whether an engine could share work with others of its revision by their roles, and
    with none by the settings.
    """
    has_other = False
    for other in engines:
        if other is engine or other.revision != engine.revision:
            continue
        for prefill, decode in ((engine, other), (other, engine)):
            if Role.PREFILL not in prefill.uses or Role.DECODE not in decode.uses:
                continue
            if decode.spec.takes_from(prefill.spec):
                return False
            has_other = True
    return has_other


def _sentences(engine: LedgerEngine, others: Mapping[LedgerEngine, str]) -> list[str]:
    if Role.ANY not in (engine.role, *[other.role for other in others]):
        pairs = [
            (engine, other) if engine.role is Role.PREFILL else (other, engine) for other in others
        ]
        return [
            f"{prefill.url} and {decode.url} are not paired: "
            f"{others[decode if engine is prefill else prefill]}"
            for prefill, decode in pairs
        ]
    first, why = next(iter(others.items()))
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return [f"{engine.url} is not paired with {first.url}{more}: {why}"]
