"""Rules about compatibility: engines that share a prompt's KV must be the same in everything that
KV depends on. Pure.

The proxy pairs only compatible engines. An aggregated engine shares no KV; another model on it is a
warning, since a client's answer then depends on the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import combinations
from typing import TypeVar

from pdproxy.check.facts import CheckFacts, EngineFacts
from pdproxy.check.findings import Finding, Level

_T = TypeVar("_T", bound=Hashable)
_Ids = tuple[tuple[str, tuple[int, ...]], ...]
"""For each base model the ids of one canary."""


def same_engine(facts: CheckFacts) -> Iterator[Finding]:
    """One engine under two URLs."""
    for one, other in combinations(facts.engines, 2):
        same_side = one.side and other.side and one.side.engine_id == other.side.engine_id
        if same_side or (_port(one) == _port(other) and one.addresses & other.addresses):
            yield Finding(
                level="error",
                code="same_engine",
                where=(one.url, other.url),
                says=f"{one.role} {one.url} and {other.role} {other.url} are the same engine",
                remedy="list each engine once, in one role",
            )


def models(facts: CheckFacts) -> Iterator[Finding]:
    """Different models, or adapters that only some engines have."""
    engines = [engine for engine in _split(facts) if engine.base_names]
    groups = _groups(engines, lambda engine: engine.base_names)
    if len(groups) > 1:
        yield Finding(
            level="error",
            code="models_differ",
            where=_urls(engines),
            says=f"the engines serve different models: {_listed(groups, _names)}",
            remedy="start all with one model and the same --served-model-name, aliases included: "
            "pdproxy pairs only those",
        )
        return
    everybody = [engine for engine in engines + facts.aggregated if engine.base_names]
    names = _groups(everybody, lambda engine: engine.names)
    if len(names) > 1:
        yield Finding(
            level="warning",
            code="names_differ",
            where=_urls(everybody),
            says=f"only some engines have all models: {_listed(names, _names)}",
            remedy="give all engines the same --served-model-name and --lora-modules: others get "
            "no "
            "requests for those",
        )
    roots = _groups([engine for engine in engines if _roots(engine)], _roots)
    if len(roots) > 1:
        yield Finding(
            level="note",
            code="roots_differ",
            where=_urls(engines),
            says=f"the engines have loaded their model from different places: "
            f"{_listed(roots, _names)}",
            remedy="harmless if these are copies of one model",
        )


def versions(facts: CheckFacts) -> Iterator[Finding]:
    """Different versions of vLLM."""
    yield from _differ(
        facts,
        lambda engine: engine.version or "unknown",
        code="versions_differ",
        says="the engines run different versions of vLLM",
        remedy="install the same version everywhere: vLLM refuses KV of another version, and "
        "pdproxy doesn't pair them",
    )


def block_sizes(facts: CheckFacts) -> Iterator[Finding]:
    """Different KV block sizes."""
    yield from _differ(
        facts,
        lambda engine: engine.block_size,
        code="block_sizes_differ",
        says="the engines have KV blocks of different sizes",
        remedy="start all with the same --block-size: D dies of a prompt that needs more blocks on "
        "D than on P",
        aggregated=False,
    )
    known = any(engine.block_size for engine in _split(facts))
    for engine in _split(facts):
        if engine.block_size is None:
            yield Finding(
                level="error" if known else "warning",
                code="block_size_unknown",
                where=(engine.url,),
                says=f"{engine.role} {engine.url} does not report its KV block size, so no pair "
                f"with it was tried",
                remedy="set facts.block_size of this node in the YAML file",
            )


def tokenizers(facts: CheckFacts) -> Iterator[Finding]:
    """Different token ids for the same text."""
    yield from _differ(
        facts,
        _prompt_ids,
        given=lambda engine: engine.base_names,
        show=_counted,
        code="tokenizers_differ",
        says="the same prompt becomes different token ids",
        remedy="give all engines the same --tokenizer, --tokenizer-mode and tokenizer files (does "
        "only one add a BOS token?)",
    )


def templates(facts: CheckFacts) -> Iterator[Finding]:
    """Different token ids for the same chat, where a prompt's are the same."""
    yield from _differ(
        facts,
        _chat_ids,
        given=_prompt_ids,
        show=_counted,
        code="templates_differ",
        says="the same chat becomes different token ids, though a prompt does not",
        remedy="give all engines the same --chat-template (and --default-chat-template-kwargs)",
    )


def lengths(facts: CheckFacts) -> Iterator[Finding]:
    """Different context lengths."""
    yield from _differ(
        facts,
        lambda engine: engine.max_model_len,
        level="warning",
        code="max_model_len_differs",
        says="the engines accept sequences of different lengths",
        remedy="start all with the same --max-model-len: the shortest one limits what a client may "
        "send",
    )


def weights(facts: CheckFacts) -> Iterator[Finding]:
    """Models of the same name that generate different text."""
    split = [engine for engine in sorted(_split(facts), key=_decode_first) if engine.completions]
    engines = split + [engine for engine in facts.aggregated if engine.completions]
    if not engines:
        return
    # The answer of most engines that share KV counts as right; in a tie, a decode engine's.
    reference = max(
        split or engines, key=lambda one: sum(not differing_answers(one, other) for other in split)
    )
    for engine in engines:
        if engine.evidence().canary != reference.evidence().canary:
            continue  # another model or tokenizer gives other answers anyway
        differing = differing_answers(engine, reference)
        if not differing:
            continue
        every = differing == min(len(engine.completions), len(reference.completions))
        level: Level = "error" if every and engine.role != "aggregated" else "warning"
        yield Finding(
            level=level,
            code="weights_differ",
            where=(engine.url, reference.url),
            says=f"{engine.role} {engine.url} and {reference.role} {reference.url} answer the "
            f"same greedy prompt differently"
            f" ({differing} of {len(engine.completions)}): {_quote(engine.completions[0].text)} /"
            f" {_quote(reference.completions[0].text)}",
            remedy="load the same weights, --revision, --dtype and --quantization on both"
            + (
                ""
                if every
                else "; if they are the same, near-ties decided differently by other kernels can "
                "cause this"
            ),
        )


def differing_answers(one: EngineFacts, other: EngineFacts) -> int:
    """Return the number of canary prompts that two engines complete differently."""
    return sum(
        not mine.same(yours)
        for mine, yours in zip(one.completions, other.completions, strict=False)
    )


def _differ(
    facts: CheckFacts,
    fact: Callable[[EngineFacts], _T],
    *,
    code: str,
    says: str,
    remedy: str,
    level: Level = "error",
    show: Callable[[_T], str] = str,
    given: Callable[[EngineFacts], Hashable] = lambda engine: None,
    aggregated: bool = True,
) -> Iterator[Finding]:
    """Yield a finding if engines that share KV differ in a known fact; a warning if only aggregated
    ones differ from them.

    If the engines already differ in `given`, another rule reports it, and this one yields nothing.
    """
    split = [engine for engine in _split(facts) if fact(engine)]
    groups = _groups(split, fact)
    if len(groups) > 1:
        if len(_groups(split, given)) == 1:
            yield Finding(
                level=level,
                code=code,
                where=_urls(split),
                says=f"{says}: {_listed(groups, show)}",
                remedy=remedy,
            )
        return
    engines = split + [engine for engine in facts.aggregated if aggregated and fact(engine)]
    groups = _groups(engines, fact)
    if len(groups) > 1 and len(_groups(engines, given)) == 1:
        yield Finding(
            level="warning",
            code=code,
            where=_urls(engines),
            says=f"{says}, aggregated ones included: {_listed(groups, show)}",
            remedy=f"{remedy.partition(':')[0]}: else an answer depends on the engine",
        )


def _prompt_ids(engine: EngineFacts) -> _Ids:
    return tuple((name, ids) for name, (ids, _) in sorted(engine.canary.items()))


def _chat_ids(engine: EngineFacts) -> _Ids:
    return tuple((name, ids) for name, (_, ids) in sorted(engine.canary.items()))


def _counted(ids: _Ids) -> str:
    return f"{sum(len(part) for _, part in ids)} ids"


def _roots(engine: EngineFacts) -> frozenset[str]:
    return frozenset(card.root for card in engine.cards if card.root and card.parent is None)


def _names(names: frozenset[str]) -> str:
    return "+".join(sorted(names))


def _decode_first(engine: EngineFacts) -> bool:
    return engine.role == "prefill"


def _split(facts: CheckFacts) -> list[EngineFacts]:
    return facts.by_role("prefill", "decode")


def _groups(
    engines: list[EngineFacts], fact: Callable[[EngineFacts], _T]
) -> dict[_T, list[EngineFacts]]:
    groups: dict[_T, list[EngineFacts]] = {}
    for engine in engines:
        groups.setdefault(fact(engine), []).append(engine)
    return groups


def _listed(groups: dict[_T, list[EngineFacts]], show: Callable[[_T], str]) -> str:
    return "; ".join(
        f"{show(value)} on {', '.join(f'{engine.role} {engine.url}' for engine in engines)}"
        for value, engines in groups.items()
    )


def _urls(engines: list[EngineFacts]) -> tuple[str, ...]:
    return tuple(engine.url for engine in engines)


def _port(engine: EngineFacts) -> str:
    return engine.url.rpartition(":")[2]


def _quote(text: str) -> str:
    flat = " ".join(text.split())
    return f'"{flat[:40]}"'


RULES = (same_engine, models, versions, block_sizes, tokenizers, templates, lengths, weights)
