"""Rules about the transfer of KV: does P return handles, can D fetch the KV, is the answer right,
is the KV released? Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.check.facts import CheckFacts, EngineFacts, PairFacts
from pdproxy.check.findings import Finding
from pdproxy.check.rules.compatible import differing_answers
from pdproxy.kit.addresses import is_any, is_loopback
from pdproxy.settings.engines import NodeRole

_CONFIG = '--kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"%s"}\''
_ROLES: tuple[NodeRole, ...] = ("prefill", "decode")
_SIDE = (
    "start it with VLLM_NIXL_SIDE_CHANNEL_HOST set to one of its addresses that the decode "
    "engines can reach"
)


def handles(facts: CheckFacts) -> Iterator[Finding]:
    """A prefill engine that returns no usable handle."""
    for engine in facts.by_role("prefill"):
        if not engine.no_handle:
            continue
        where, name = (engine.url,), f"prefill {engine.url}"
        if engine.side is not None and engine.side.mode != "pull":
            yield Finding(
                level="error",
                code="push_connector",
                where=where,
                says=f"{name} pushes KV (transfer_mode {engine.side.mode}), but with pdproxy's "
                f"connector nixl D pulls it",
                remedy=f"start all engines with NixlConnector: {_CONFIG % 'kv_producer'}",
            )
        elif engine.metrics is not None and not engine.metrics.nixl:
            yield Finding(
                level="error",
                code="no_connector",
                where=where,
                says=f"{name} returns no KV handle, and its metrics have no NIXL: it runs without "
                f"a KV connector",
                remedy=f"start it with {_CONFIG % 'kv_producer'}",
            )
        else:
            yield Finding(
                level="error",
                code="no_handle",
                where=where,
                says=f"{name} returns no usable KV handle: {engine.no_handle}",
                remedy=f"read its log; it should run with {_CONFIG % 'kv_producer'}",
            )


def roles(facts: CheckFacts) -> Iterator[Finding]:
    """Engines started for the other role. NIXL works with them, but vLLM frees a consumer's blocks
    with more care.
    """
    prefills, decodes = (
        [one for one in facts.by_role(role) if one.role == role] for role in _ROLES
    )
    consumers = [
        engine for engine in prefills if engine.metrics is not None and engine.metrics.consumer
    ]
    producers = [
        e for e in decodes if e.metrics is not None and e.metrics.nixl and not e.metrics.consumer
    ]
    shows_roles = any(
        engine.metrics is not None and engine.metrics.consumer for engine in prefills + decodes
    )
    for engine in producers if shows_roles else ():
        if consumers:
            yield Finding(
                level="error",
                code="roles_swapped",
                where=(engine.url, *(other.url for other in consumers)),
                says=f"roles are swapped: decode {engine.url} was started as kv_producer, prefill "
                f"{consumers[0].url} as consumer",
                remedy="swap their URLs in --prefill and --decode, or start them with the other "
                "kv_role",
            )
        else:
            yield _producer_decodes(engine)
    if not shows_roles and any(_shows_consumers(engine) for engine in producers):
        yield from (_producer_decodes(engine) for engine in producers if _shows_consumers(engine))
    for engine in consumers if not producers else ():
        yield Finding(
            level="note",
            code="prefill_is_consumer",
            where=(engine.url,),
            says=f"prefill {engine.url} was started with kv_role kv_both or kv_consumer",
            remedy=f"it works; vLLM expects {_CONFIG % 'kv_producer'} here, and will remove "
            f"kv_both",
        )


def pairs(facts: CheckFacts) -> Iterator[Finding]:
    """A request through a pair that failed, or whose KV did not move."""
    for pair, prefill, decode in facts.asked_pairs():
        last, name, where = pair.last, _pair(pair), (pair.prefill, pair.decode)
        trouble = side_trouble(prefill, decode)
        no_connector = decode.metrics is not None and not decode.metrics.nixl
        says, code, remedy = "", "", _remedy(trouble)
        match last.end:
            case "refused":
                code, says = "split_failed", f"{name}: D could not load P's KV and {last.text}"
            case "silent":
                code, says = "split_silent", f"{name}: D {last.text} to a request with P's KV"
                remedy = (
                    f"{remedy}; D may need a restart: a request that waits for the KV of a "
                    f"frozen engine never ends"
                )
            case "answered" if last.counted and not last.kv_moved and no_connector:
                code = "decode_no_connector"
                says = (
                    f"{name}: no KV moved: D's metrics have no NIXL, it ignores the handle and "
                    f"computes every prompt again"
                )
                remedy = f"start D with {_CONFIG % 'kv_consumer'}"
            case "answered" if last.counted and not last.kv_moved:
                code = "kv_not_moved"
                moved = (
                    f"only {last.moved} of {last.prompt_tokens} prompt tokens moved"
                    if last.moved
                    else "no KV moved"
                )
                says = f"{name}: {moved}, D computed the prompt again"
                says += ", after a failed transfer" if last.failed else ""
            case _:
                continue
        if trouble and code != "decode_no_connector":
            says += f" ({trouble})"
            code = "side_channel"
        yield Finding(level="error", code=code, where=where, says=says, remedy=remedy)


def answers(facts: CheckFacts) -> Iterator[Finding]:
    """A split answer that differs from D's own."""
    for pair, prefill, decode in facts.asked_pairs():
        if not pair.last.differs or not pair.last.kv_moved or differing_answers(prefill, decode):
            continue
        answer, alone = pair.last.answer, pair.last.alone
        assert answer is not None
        assert alone is not None
        yield Finding(
            level="error",
            code="split_differs",
            where=(pair.prefill, pair.decode),
            says=f"{_pair(pair)}: with P's KV D answers {answer.text!r}, without it "
            f"{alone.text!r}, twice in a row, both greedy",
            remedy="the KV is wrong: compare --dtype, --kv-cache-dtype, --quantization, attention "
            "backend, parallel sizes",
        )


def wavering(facts: CheckFacts) -> Iterator[Finding]:
    """A first split answer that differed from D's own, and a second one that did not."""
    for pair, *_ in facts.asked_pairs():
        if len(pair.tries) > 1 and not pair.last.differs and pair.last.end == "answered":
            yield Finding(
                level="warning",
                code="split_wavers",
                where=(pair.prefill, pair.decode),
                says=f"{_pair(pair)}: one of two greedy answers differed from D's own",
                remedy="near-ties between tokens cause this; if it is frequent, compare --dtype "
                "and "
                "--kv-cache-dtype",
            )


def kept(facts: CheckFacts) -> Iterator[Finding]:
    """KV that P still holds although it is no longer needed."""
    for pair, *_ in facts.asked_pairs():
        if not pair.last.kept:
            continue
        well = pair.last.kv_moved
        yield Finding(
            level="warning" if well else "note",
            code="kv_kept",
            where=(pair.prefill, pair.decode),
            says=f"{_pair(pair)}: P still holds the KV of this check's request"
            + (
                " although D has fetched it"
                if well
                else ", because D could not release it: its lease will end it"
            ),
            remedy="D's notice did not reach P: look for failed notifications in D's log; P's "
            "memory is used until leases end"
            if well
            else "nothing more to do: this ends with the cause above",
        )


def untried(facts: CheckFacts) -> Iterator[Finding]:
    """A pair of compatible engines that work, and that could not be tried."""
    for pair, prefill, decode in facts.asked_pairs():
        compatible = prefill.evidence().difference(decode.evidence()) is None
        works = all(engine.could_be_asked and not engine.no_output for engine in (prefill, decode))
        if pair.last.end == "untried" and compatible and works:
            yield Finding(
                level="warning",
                code="pair_untried",
                where=(pair.prefill, pair.decode),
                says=f"{_pair(pair)} was not tried: {pair.last.text}",
                remedy="so far nothing proves that KV moves between them: remove the cause and "
                "check again",
            )


def side_trouble(prefill: EngineFacts, decode: EngineFacts) -> str:
    """Return what is wrong with the address that P's handles name, from D's machine; "" if nothing
    is known to be wrong.
    """
    side = prefill.side
    if side is None:
        return ""
    named = f"P's handles name {side.host or 'no host'}:{side.port}"
    if side.host in ("", "*") or is_any(side.host):
        return f"{named}: an address to listen on, not one to connect to"
    if side.reach == "unresolvable":
        return f"{named}, and that host has no address"
    loopback = any(map(is_loopback, side.addresses))
    if loopback and not prefill.addresses & decode.addresses:
        return f"{named}: on D's machine this is D's machine itself"
    if side.reach == "closed":
        return f"{named}, and nothing listens there"
    return ""


def _remedy(trouble: str) -> str:
    if trouble:
        return f"P's side channel has the wrong address: {_SIDE} (and _PORT; the port must be open)"
    return (
        "look for `NIXL` in D's log: can it reach P's side channel (VLLM_NIXL_SIDE_CHANNEL_HOST; "
        "not a loopback)"
        " and P's memory (UCX_TLS, UCX_NET_DEVICES)? NIXL, --kv-cache-dtype and attention "
        "backend must be the same"
    )


def _producer_decodes(engine: EngineFacts) -> Finding:
    return Finding(
        level="error",
        code="decode_is_producer",
        where=(engine.url,),
        says=f"decode {engine.url} was started as kv_producer: vLLM may then write into blocks "
        f"while KV arrives in them",
        remedy=f"start it with {_CONFIG % 'kv_consumer'}",
    )


def _shows_consumers(engine: EngineFacts) -> bool:
    """Return whether this version of vLLM shows in its metrics that it is a consumer."""
    return engine.version.startswith("0.32.")


def _pair(pair: PairFacts) -> str:
    return f"P {pair.prefill} and D {pair.decode}"


RULES = (handles, roles, pairs, answers, wavering, kept, untried)
