"""What is known of engines' prefix caches: one answer for all engines from all indexes, and how
right it was. Pure.

An engine whose KV events are read is `fed`: its blocks are those that it has reported, and, for a
short time, those of prompts that were just sent there. Of other engines, and of prompts without
token ids, only our own routing is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.prefix.block_index import BlockIndex
from pdproxy.scheduling.prefix.matches import Matches
from pdproxy.scheduling.prefix.prediction import Prediction, PredictionScore, cached_tokens
from pdproxy.scheduling.prefix.prompts import MAX_KEYS, TOKEN_TEXT, PromptBeginning
from pdproxy.scheduling.prefix.reading import GPU, BlockHash
from pdproxy.scheduling.prefix.refreshing import Refreshing
from pdproxy.scheduling.prefix.routed import RoutedIndex
from pdproxy.scheduling.prefix.speculative import SpeculativeIndex

EVENTS, ROUTING, TEXT = "events", "routing", "text"
"""What a prediction is based on."""
FRESH = 0.5
"""Seconds for which what was found for a request is used again."""
_SURE = 4
"""So many answers in a row that are one block off show that an engine drops a prompt's last block
(EAGLE, MTP), or does not.
"""
_TEXT_WEIGHT = 0.02
_SUSPECTS = 1024

Places = Mapping[tuple[str, int], int]
"""The block index's places by engine (its URL) and data-parallel rank."""


@dataclass(slots=True)
class _Engine:
    """`place`: its number in the indexes of routing. `block_size`: of its blocks, tokens.
    `one_off`: answers so in a row.
    """

    place: int
    block_size: int
    drops_last: bool = False
    one_off: int = 0


@dataclass(slots=True)
class Knowledge:
    """Which engines hold a prompt's beginning. `unit`: tokens per key of all indexes. `blocks`:
    what events say.

    `adapters()`: the names of LoRA adapters. Engines have to be added.
    """

    unit: int
    blocks: BlockIndex
    routing: RoutedIndex
    speculative: SpeculativeIndex
    refreshing: Refreshing
    adapters: Callable[[], frozenset[str]] = frozenset
    places: Places = field(default_factory=dict)
    """Of the engines whose events are read."""
    connected: Callable[[str], bool] = lambda url: True
    """Whether the events of such an engine come at present."""
    scores: dict[str, PredictionScore] = field(
        default_factory=lambda: {basis: PredictionScore() for basis in (EVENTS, ROUTING, TEXT)}
    )
    text_per_token: float = float(TOKEN_TEXT)
    """Bytes of text per token, as answers show."""
    _engines: dict[str, _Engine] = field(default_factory=dict)
    _urls: dict[int, str] = field(default_factory=dict)
    """The engines by their numbers in the indexes of routing."""
    _fed: dict[str, list[int]] = field(default_factory=dict)
    _fed_urls: dict[int, str] = field(default_factory=dict)
    _numbers: int = 0
    _by_routing: set[str] = field(default_factory=set)
    """Engines of which prompts with token ids were noted as routed, since there were no events."""
    _suspects: OrderedDict[tuple[str, int | None], None] = field(default_factory=OrderedDict)
    """Where events said too much once: the engine, and the first key that it did not hold."""
    disproved: int = 0
    """How often what events said was dropped, for it was wrong again. Read only."""
    _stale: bool = False

    # -- engines

    def add(self, url: str, block_size: int | None = None, blocks: int | None = None) -> None:
        """Note an engine, or what it says of its KV blocks: their size in tokens and their number,
        None where unknown.
        """
        engine = self._engines.get(url)
        if engine is None:
            engine = self._engines[url] = _Engine(self._numbers, self.unit)
            self._urls[engine.place] = url
            self._numbers += 1
        engine.block_size = block_size or self.unit
        if blocks is not None:
            self.routing.set_capacity(engine.place, max(1, blocks * engine.block_size // self.unit))

    def restarted(self, url: str) -> None:
        """Forget what was sent to an engine: it has started again. What events say of it is their
        reader's concern.
        """
        self.remove(url)
        self.add(url)

    def remove(self, url: str) -> None:
        """Forget an engine."""
        engine = self._engines.pop(url, None)
        if engine is not None:
            del self._urls[engine.place]
            self._by_routing.discard(url)
            self.routing.remove_place(engine.place)
            self.speculative.remove_place(engine.place)
        self.refreshing.forget(url)
        for suspect in [suspect for suspect in self._suspects if suspect[0] == url]:
            del self._suspects[suspect]

    def is_fed(self, url: str) -> bool:
        """Return whether an engine's events are read, and come."""
        return url in self._sources() and self.connected(url)

    def _sources(self) -> Mapping[str, list[int]]:
        """Return the fed engines with their places."""
        if self._stale or len(self._fed_urls) != len(self.places):
            self._fed, self._fed_urls, self._stale = {}, {}, False
            for (url, _), place in self.places.items():
                self._fed.setdefault(url, []).append(place)
                self._fed_urls[place] = url
        return self._fed

    # -- events

    def changed(self) -> None:
        """Note that engines' places are about to change."""
        self._stale = True

    def forgotten(self, place: int) -> None:
        """Note that a place is empty, or that nothing is known of it any more."""
        self._sources()
        if (url := self._fed_urls.get(place)) in self._engines:
            self.speculative.remove_place(self._engines[url].place)

    def evicted(self, place: int, keys: Sequence[int]) -> None:
        """Note that a place holds these keys no longer: what was routed there a moment ago may be
        evicted already.
        """
        if keys and len(self.speculative):
            self._sources()
            if (url := self._fed_urls.get(place)) in self._engines:
                self.speculative.gone(self._engines[url].place, keys)

    # -- questions

    def cached(self, ask: Ask) -> Mapping[str, int]:
        """Return how many tokens of a prompt engines should have in their caches, by URL. Others
        have none, or are not known.

        One search per request: what it finds is kept in `ask.beginning`.
        """
        beginning = ask.beginning
        return {} if beginning is None else self.found(beginning, ask.now)

    def found(self, beginning: PromptBeginning, now: float) -> Mapping[str, int]:
        """Return the same for a prompt."""
        known = beginning.found
        if known is None or now - beginning.found_at > FRESH:
            known = beginning.found = self._search(beginning, now)
            beginning.found_at = now
        return known

    def may_hold_more(self, beginning: PromptBeginning, tokens: int, now: float) -> bool:
        """Return whether an engine may have more of a prompt in its cache than its first `tokens`
        tokens, by whose ids it is known: all of these are there, up to a block or two.
        """
        blocks = [engine.block_size for engine in self._engines.values()]
        most = max(self.found(beginning, now).values(), default=0)
        return most + 2 * max([beginning.unit, *blocks]) > tokens

    def _search(self, beginning: PromptBeginning, now: float) -> dict[str, int]:
        units: dict[str, int] = {}
        if not beginning.of_text and self._sources():
            if self._by_routing:
                self._forget_routing()
            _longest(units, self.blocks.lookup(beginning.keys), self._fed_urls)
            _longest(units, self.speculative.lookup(beginning.keys, now), self._urls)
        _longest(units, self.routing.lookup(beginning.keys), self._urls)
        found: dict[str, int] = {}
        for url, count in units.items():
            engine = self._engines.get(url)
            if engine is not None:
                tokens = cached_tokens(
                    count * beginning.unit,
                    beginning.tokens,
                    engine.block_size,
                    drops_last=engine.drops_last,
                )
                if tokens:
                    found[url] = tokens
        return found

    def _forget_routing(self) -> None:
        """Forget what was routed to engines whose events come (again): from now on these say what
        the engines hold.
        """
        for url in [url for url in self._by_routing if self.is_fed(url)]:
            self._by_routing.discard(url)
            self.routing.forget(self._engines[url].place)

    # -- requests

    def sent(self, beginning: PromptBeginning, leases: Sequence[Lease], now: float) -> None:
        """Note that a prompt is sent to engines, the first of which computes it, and with their
        leases what is expected there.
        """
        for lease in leases:
            # A decode engine that gets the KV from another one says nothing of its own cache, and
            # is asked nothing.
            found = self.routed(beginning, lease.engine.url, now, reports=lease is leases[0])
            lease.prediction, lease.expected = found, found is not None
            lease.reports = found is not None and found.refreshes

    def routed(
        self, beginning: PromptBeginning, url: str, now: float, *, reports: bool = True
    ) -> Prediction | None:
        """Note that a prompt is sent to an engine. Return what is expected there, None if the
        engine is gone.

        `reports`: whether the engine reports what it has found in its cache.
        """
        engine = self._engines.get(url)
        if engine is None:
            return None
        tokens = self.found(beginning, now).get(url, 0)
        fed = not beginning.of_text and self.is_fed(url)
        basis = TEXT if beginning.of_text else EVENTS if fed else ROUTING
        whole = beginning.tokens <= MAX_KEYS * beginning.unit
        scored = reports and (not fed or len(self._fed[url]) == 1) and whole
        prediction = Prediction(url, tokens, basis, beginning, scored)
        if fed and scored:
            prediction.refreshes = self.refreshing.due(url, beginning.keys, now)
            if prediction.refreshes:
                self.blocks.asked(self._fed[url][0], self._key_behind(beginning, 0))
        if beginning.is_begun:
            beginning.sent_to.append(url)
        self._note_routed(engine, beginning, url, now, fed=fed)
        return prediction

    def completed(self, beginning: PromptBeginning, now: float) -> None:
        """Note all keys of a prompt where only its first ones were noted as routed."""
        for url in beginning.sent_to:
            if (engine := self._engines.get(url)) is not None:
                self._note_routed(engine, beginning, url, now, fed=self.is_fed(url))

    def _note_routed(
        self, engine: _Engine, beginning: PromptBeginning, url: str, now: float, *, fed: bool
    ) -> None:
        if fed:
            self.speculative.routed(engine.place, beginning.keys, now)
        else:
            self.routing.routed(engine.place, beginning.keys)
            if not beginning.of_text:
                self._by_routing.add(url)

    def answered(self, prediction: Prediction, reported: int, prompt: int) -> None:
        """Compare a prediction with what the engine says: `reported` of the `prompt`'s tokens were
        in its cache.
        """
        beginning, url = prediction.beginning, prediction.url
        if prediction.refreshes:
            self.refreshing.accepted(url)
        if not prediction.scored or reported > prompt:
            return
        engine = self._engines.get(url)
        error = self.scores[prediction.basis].add(prediction.tokens, reported)
        if engine is None:
            return
        if beginning.of_text:
            if prompt and beginning.tokens:
                seen = beginning.tokens * self.text_per_token / prompt
                self.text_per_token += _TEXT_WEIGHT * (
                    min(max(seen, 1.0), 16.0) - self.text_per_token
                )
            if error > 0 and not reported:
                self.routing.gone(engine.place, beginning.keys.all())
            return
        if self._is_one_off(engine, error, reported):
            return
        if error > 0 and prediction.basis == EVENTS:
            self._too_much(engine, prediction, reported)
        elif (
            # Of an engine with smaller blocks than the unit, less than a unit is never known; of a
            # full index, nothing more.
            error <= -beginning.unit
            and prediction.basis == EVENTS
            and not prediction.refreshes
            and len(self.blocks) < self.blocks.max_blocks
        ):
            self.refreshing.wanted(url, self._key_behind(beginning, prediction.tokens))

    def refuses_reports(self, url: str) -> None:
        """Note that an engine refuses a request that would have it report. One that was removed is
        forgotten already.
        """
        if url in self._engines:
            self.refreshing.refuses(url)

    def _is_one_off(self, engine: _Engine, error: int, reported: int) -> bool:
        """Learn whether an engine drops a prompt's last block. Return whether an error may come
        from that.
        """
        if not error:
            engine.one_off = 0 if reported else engine.one_off  # without a hit it shows nothing
            return False
        expected = -engine.block_size if engine.drops_last else engine.block_size
        if error != expected:
            return False
        engine.one_off += 1
        if engine.one_off >= _SURE:
            engine.drops_last, engine.one_off = not engine.drops_last, 0
        return True

    def _too_much(self, engine: _Engine, prediction: Prediction, reported: int) -> None:
        """Note that an engine held less than its events said. It has computed the rest now, so they
        are right again.

        If they are wrong once more at the same place, it does not keep such prompts: what events
        said of them is dropped.
        """
        beginning, suspects = prediction.beginning, self._suspects
        suspect = (prediction.url, self._key_behind(beginning, reported))
        if suspect not in suspects:
            suspects[suspect] = None
            if len(suspects) > _SUSPECTS:
                suspects.popitem(last=False)
            return
        del suspects[suspect]
        units = reported // beginning.unit
        for place in self._sources().get(prediction.url, ()):
            self.blocks.disproved(place, beginning.keys, units)
        self.speculative.gone(engine.place, beginning.keys.all()[units:])
        self.disproved += 1

    @staticmethod
    def _key_behind(beginning: PromptBeginning, tokens: int) -> int | None:
        """Return the first key behind so many tokens of a prompt, None if there is none."""
        at = tokens // beginning.unit
        for step in beginning.keys:
            if at < len(step):
                return step[at]
            at -= len(step)
        return None

    def tidy(self, limit: int) -> bool:
        """Remove up to `limit` blocks of each index that match nothing any more. Return whether
        there are more.
        """
        more = self.blocks.tidy(limit)
        return self.routing.tidy(limit) or more


class FedIndex:
    """Takes the KV events of engines for `knowledge`: `fleet.kv_events.Index`."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._blocks = knowledge.blocks
        self.stored = knowledge.blocks.stored

    def removed(
        self, place: int, block_hashes: Sequence[BlockHash], medium: str, group: int
    ) -> None:
        """Take note that blocks are gone."""
        keys = self._blocks.removed(place, block_hashes, medium, group)
        if medium == GPU:  # what was just sent there is in the GPU's memory, whatever others drop
            self._knowledge.evicted(place, keys)

    def cleared(self, place: int) -> None:
        """Take note that the engine has emptied its prefix cache."""
        self._blocks.cleared(place)
        self._knowledge.forgotten(place)

    def restart(self, place: int) -> None:
        """Forget all of a place."""
        self._blocks.restart(place)
        self._knowledge.forgotten(place)

    def add_place(self) -> int:
        """Return the number of a new place."""
        self._knowledge.changed()
        return self._blocks.add_place()

    def remove_place(self, place: int) -> None:
        """Forget a place."""
        self._knowledge.changed()
        self._blocks.remove_place(place)


def _longest(units: dict[str, int], matches: Matches, urls: Mapping[Any, str]) -> None:
    """Take over the matches that are longer than those that are known."""
    for place, count in matches.anywhere.items():
        url = urls.get(place)
        if url is not None and count > units.get(url, 0):
            units[url] = count
