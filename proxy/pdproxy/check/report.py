"""The report as text or as JSON. Owns the verdict and its exit codes. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from pdproxy.check.facts import CheckFacts, EngineFacts, PairFacts
from pdproxy.check.findings import Finding
from pdproxy.transfer.detect import DetectedContract

Mark = Literal["good", "bad", "warning", "note"]
_UNICODE: dict[Mark, str] = {"good": "✓", "bad": "✗", "warning": "!", "note": "·"}
_ASCII: dict[Mark, str] = {"good": "+", "bad": "x", "warning": "!", "note": "-"}
_COLOURS: dict[Mark, str] = {"good": "32", "bad": "31", "warning": "33", "note": "36"}
_LEVEL_MARKS: dict[str, Mark] = {"error": "bad", "warning": "warning", "note": "note"}
WIDTH = 120


class TextStyle(msgspec.Struct, frozen=True):
    """How the text looks: marks beyond ASCII, colours."""

    unicode: bool = True
    colour: bool = False

    def mark(self, mark: Mark) -> str:
        """Return a mark."""
        text = (_UNICODE if self.unicode else _ASCII)[mark]
        return f"\x1b[{_COLOURS[mark]}m{text}\x1b[0m" if self.colour else text


def exit_code(findings: Sequence[Finding], *, strict: bool) -> int:
    """Return 1 if there are errors, or warnings with `strict`; else 0."""
    failing = ("error", "warning") if strict else ("error",)
    return int(any(finding.level in failing for finding in findings))


def verdict(facts: CheckFacts, findings: Sequence[Finding]) -> str:
    """Return the verdict in one line."""
    errors, warnings = (
        sum(finding.level == level for finding in findings) for level in ("error", "warning")
    )
    counted = " and ".join(
        _count(number, word)
        for number, word in ((errors, "error"), (warnings, "warning"))
        if number
    )
    moving = sum(pair.last.kv_moved for pair in facts.pairs)
    if errors:
        return f"NOT READY: {counted}"
    tried = f"KV moves in {moving} of {len(facts.pairs)} pairs" if facts.pairs else "no pair to try"
    return f"ready, with {counted}: {tried}" if warnings else f"ready: {tried}"


def as_text(facts: CheckFacts, findings: Sequence[Finding], style: TextStyle) -> str:
    """Return the report as text, with a line break at its end."""
    lines = [*_connector(facts), "engines", *_engines(facts, findings, style)]
    if facts.pairs:
        lines += ["pairs", *_pairs(facts, findings, style)]
    if findings:
        lines += ["findings", *(line for finding in findings for line in _finding(finding, style))]
    return "\n".join([*lines, verdict(facts, findings)]) + "\n"


def as_json(facts: CheckFacts, findings: Sequence[Finding], *, strict: bool) -> bytes:
    """Return the report as one JSON object."""
    body = {
        "exit_code": exit_code(findings, strict=strict),
        "verdict": verdict(facts, findings),
        "findings": findings,
        "connector": None
        if facts.connector is None
        else {
            "name": facts.connector.contract
            if isinstance(facts.connector, DetectedContract)
            else None,
            "evidence": facts.connector.lines,
        },
        "engines": [
            {
                "url": engine.url,
                "role": engine.role,
                "trouble": engine.trouble.text if engine.trouble else None,
                "version": engine.version or None,
                "models": sorted(engine.names),
                "max_model_len": engine.max_model_len,
                "block_size": engine.block_size,
                "side_channel": f"{engine.side.host}:{engine.side.port}" if engine.side else None,
                "lease_ended_after_s": engine.lease.ended if engine.lease else None,
                "lease_watched_s": engine.lease.watched if engine.lease else None,
                "kv_load_failure_policy": engine.policy.answer if engine.policy else None,
                "encodes": not engine.encoding.why_not if engine.encoding else None,
            }
            for engine in facts.engines
        ],
        "pairs": [
            {
                "prefill": pair.prefill,
                "decode": pair.decode,
                "kv_moved": pair.last.kv_moved,
                "tries": len(pair.tries),
                "outcome": pair.last.end,
                "reason": pair.last.text or None,
                "prompt_tokens": pair.last.prompt_tokens,
                "moved_tokens": pair.last.moved,
                "same_answer": None if pair.last.alone is None else not pair.last.differs,
                "decode_s": round(pair.last.seconds, 4),
            }
            for pair in facts.pairs
        ],
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2)


def pools_as_text(
    pools: Mapping[str, tuple[CheckFacts, Sequence[Finding]]],
    others: Mapping[str, str],
    style: TextStyle,
) -> str:
    """Return the reports on several pools by their names. `others`: the connectors of those that
    were not checked.
    """
    texts = [
        f"pool {name}\n{as_text(facts, findings, style)}"
        for name, (facts, findings) in pools.items()
    ]
    texts += [
        f"pool {name}\nnot checked: {_why_not(connector)}\n" for name, connector in others.items()
    ]
    return "\n".join(texts)


def pools_as_json(
    pools: Mapping[str, tuple[CheckFacts, Sequence[Finding]]],
    others: Mapping[str, str],
    *,
    strict: bool,
) -> bytes:
    """Return the reports on several pools as one JSON object. `others`: the connectors of those
    that were not checked.
    """
    body = {
        "exit_code": max(exit_code(findings, strict=strict) for _, findings in pools.values()),
        "pools": [
            {"name": name, "report": msgspec.Raw(as_json(facts, findings, strict=strict))}
            for name, (facts, findings) in pools.items()
        ],
        "not_checked": [
            {"name": name, "why": _why_not(connector)} for name, connector in others.items()
        ],
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2)


def _why_not(connector: str) -> str:
    return f"connector {connector}: run `pdproxy conformance`, which tests all connectors"


def _connector(facts: CheckFacts) -> Iterator[str]:
    """Yield what connector the engines show, and by what."""
    if facts.connector is None:
        return
    name = facts.connector.contract if isinstance(facts.connector, DetectedContract) else "unclear"
    yield f"connector: {name}"
    for line in facts.connector.lines:
        yield from wrapped(line, "  ", "    ", 2)


def _engines(facts: CheckFacts, findings: Sequence[Finding], style: TextStyle) -> Iterator[str]:
    width = max(len(engine.url) for engine in facts.engines)
    for engine in facts.engines:
        mark = style.mark(_worst(findings, engine.url))
        yield f"  {mark} {engine.role:<10} {engine.url:<{width}}  {_known(engine)}"


def _known(engine: EngineFacts) -> str:
    if engine.trouble is not None:
        return engine.trouble.text
    if engine.is_proxy:
        return "a pdproxy, not an engine"
    parts = [f"vLLM {engine.version or '?'}", "+".join(sorted(engine.base_names)) or "no model"]
    parts += [f"{engine.max_model_len} tokens"] if engine.max_model_len else []
    parts += [f"blocks of {engine.block_size}"] if engine.block_size else []
    if engine.encoding is not None:
        parts.append("encodes no picture" if engine.encoding.why_not else "encodes pictures")
    if engine.side is not None:
        parts.append(f"side channel {engine.side.host}:{engine.side.port}")
    if engine.lease is not None:
        parts.append(
            f"lease over {engine.lease.watched:g} s"
            if engine.lease.ended is None
            else f"lease {engine.lease.ended:.1f} s"
        )
    if engine.policy is not None:
        parts.append(f"failed loads: {engine.policy.answer or '?'}")
    return ", ".join(parts)


def _pairs(facts: CheckFacts, findings: Sequence[Finding], style: TextStyle) -> Iterator[str]:
    names = [f"{pair.prefill} > {pair.decode}" for pair in facts.pairs]
    width = max(map(len, names))
    for pair, name in zip(facts.pairs, names, strict=True):
        good = pair.last.kv_moved and not pair.last.differs
        yield f"  {style.mark('good' if good else 'bad')} {name:<{width}}  {_outcome(pair)}"


def _outcome(pair: PairFacts) -> str:
    last = pair.last
    if last.end == "untried":
        return f"not tried: {last.text}"
    if last.end == "no_handle":
        return f"no handle: {last.text}"
    if last.end in ("refused", "silent"):
        return last.text
    moved = (
        f"{last.moved} of {last.prompt_tokens} prompt tokens moved"
        if last.counted
        else "no counters"
    )
    if last.alone is None:
        return f"{moved}, answer not compared"
    return (
        f"{moved}, {'a different answer from' if last.differs else 'the same answer as'} D "
        f"alone, {last.seconds * 1000:.0f} ms"
    )


def _finding(finding: Finding, style: TextStyle) -> Iterator[str]:
    mark = style.mark(_LEVEL_MARKS[finding.level])
    yield from wrapped(f"{finding.says} [{finding.code}]", f"  {mark} ", "    ", 4)
    if finding.remedy:
        yield from wrapped(
            finding.remedy, "      > " if not style.unicode else "      → ", "        ", 8
        )


def wrapped(text: str, first: str, others: str, width: int) -> Iterator[str]:
    """Wrap a text; `first` may contain colours, so its width is an argument."""
    lines = textwrap.wrap(text, WIDTH - width, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        yield (others if number else first) + line


def _worst(findings: Sequence[Finding], url: str) -> Mark:
    levels = {finding.level for finding in findings if url in finding.where}
    return "bad" if "error" in levels else "warning" if "warning" in levels else "good"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
