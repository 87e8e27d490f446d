"""Which contract the engines of a pool run, from what they showed and answered. Pure; a table in
`signs` of each contract.

Nothing is guessed: if two contracts fit, or engines fit different ones, the result is a text for
the operator, with all that was asked and answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pdproxy.transfer import registry
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.signs import SignQuestion

NOTHING = "null"
_MAX_SHOWN = 200  # characters of an answer's params


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine showed. `None` and empty texts: it was not asked, or the answer is not
    known.
    """

    url: str
    role: str
    version: str = ""
    metrics: frozenset[str] | None = None
    """Those beginnings of names (of all contracts' signs) that its metrics have."""
    kv_connector: str | None = None
    """By its `/server_info`; empty if that says that it has none."""
    answer: bytes | None = None
    """A prefill engine's `kv_transfer_params` in its answer to a contract's question."""
    refusal: str = ""
    """Why it gave no answer to that."""
    bootstrap: bool | None = None
    """Whether a Mooncake bootstrap server answered at its address."""

    def text(self) -> str:
        """Return what was asked and answered, in one line."""
        said = [f"vLLM {self.version}" if self.version else "no version"]
        if self.kv_connector is not None:
            said.append(f"/server_info names {self.kv_connector or 'no connector'}")
        if self.metrics is None:
            said.append("no /metrics")
        else:
            said.append(
                f"/metrics has "
                f"{' and '.join(f'{name}*' for name in sorted(self.metrics)) or 'no KV connector'}"
            )
        if self.answer is not None:
            shown = self.answer.decode("utf-8", "replace")
            shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
            shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
            said.append(f"asked to keep KV it answered kv_transfer_params = {shown}")
        if self.refusal:
            said.append(f"asked to keep KV it answered nothing: {self.refusal}")
        if self.bootstrap is not None:
            said.append(f"{'a' if self.bootstrap else 'no'} Mooncake bootstrap server answered")
        return f"{self.role} {self.url}: {', '.join(said)}"


class DetectedContract(msgspec.Struct, frozen=True):
    """The contract of all engines. `lines`: what each engine showed."""

    contract: str
    lines: tuple[str, ...]


class Undecided(msgspec.Struct, frozen=True):
    """No contract, and the reason. `choices`: the contracts that fit, if there are several.
    `lines`: what each engine showed.
    """

    reason: str
    choices: tuple[str, ...]
    lines: tuple[str, ...]


def _all(entries: Sequence[Entry] | None) -> Sequence[Entry]:
    return registry.ENTRIES if entries is None else entries


def metrics_to_look_for(entries: Sequence[Entry] | None = None) -> tuple[str, ...]:
    """Return all beginnings of names of metrics that are a sign of a contract."""
    return tuple(sorted({name for entry in _all(entries) for name in entry.signs.metrics}))


def has_bootstrap(entries: Sequence[Entry] | None = None) -> bool:
    """Return whether a bootstrap server is a sign of any contract."""
    return any(entry.signs.bootstrap for entry in _all(entries))


def question(seen: Observation, entries: Sequence[Entry] | None = None) -> SignQuestion | None:
    """Return what a prefill engine may be asked, None for nothing: it may be of a contract whose
    engines crash at it.
    """
    if seen.role != "prefill":
        return None
    asks = [entry.signs.ask for entry in candidates(seen, entries)]
    params = {None if ask is None else ask.params for ask in asks}
    return asks[0] if len(params) == 1 else None


def candidates(seen: Observation, entries: Sequence[Entry] | None = None) -> tuple[Entry, ...]:
    """Return the contracts that fit all that one engine showed."""
    return tuple(entry for entry in _all(entries) if _fits(entry, seen))


def _fits(entry: Entry, seen: Observation) -> bool:
    signs = entry.signs
    if seen.kv_connector is not None and seen.kv_connector not in entry.kv_connectors:
        return False
    if not signs.in_version(seen.version):
        return False
    if (claimed := seen.metrics) is not None:
        own = claimed.intersection(signs.metrics)
        if not own and (signs.always or claimed):
            return False
    if seen.role == "prefill" and signs.bootstrap and seen.bootstrap is False:
        return False
    if seen.bootstrap and not signs.bootstrap:
        return False
    if seen.answer is not None:
        return signs.ask is not None and signs.ask.shown_by(seen.answer)
    return True


def decide(
    seen: Sequence[Observation], entries: Sequence[Entry] | None = None
) -> DetectedContract | Undecided:
    """Return the one contract that fits all engines, or why there is none. There is at least one
    engine.
    """
    lines = tuple(one.text() for one in seen)
    fitting = {one.url: [entry.name for entry in candidates(one, entries)] for one in seen}
    for one in seen:
        if not fitting[one.url]:
            return Undecided(_why_none(one), (), lines)
    common = [
        name for name in fitting[seen[0].url] if all(name in found for found in fitting.values())
    ]
    if len(common) == 1:
        return DetectedContract(common[0], lines)
    if common:
        nothing_shown = all(
            not one.metrics and one.kv_connector is None and not one.bootstrap for one in seen
        )
        names = _either(common) + (", or none" if nothing_shown else "")
        return Undecided(
            f"the engines do not show which of these they run: {names}. Name it",
            tuple(common),
            lines,
        )
    kinds = {_either(found): url for url, found in reversed(fitting.items())}
    each = ", ".join(f"{url} is {kind}" for kind, url in reversed(kinds.items()))
    return Undecided(f"engines of different connectors: {each}", (), lines)


def _why_none(seen: Observation) -> str:
    if seen.kv_connector == "":
        return f"{seen.url} was started without a KV connector (--kv-transfer-config)"
    if seen.kv_connector is not None:
        return f"no connector of pdproxy's serves {seen.kv_connector} of {seen.url}"
    if seen.answer is not None and seen.answer.decode("utf-8", "replace") == NOTHING:
        return f"{seen.url} keeps no KV although it has such a connector: read its log"
    return f"no connector of pdproxy's fits {seen.url}"


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
