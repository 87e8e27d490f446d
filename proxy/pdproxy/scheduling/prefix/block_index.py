"""The index of engines' KV blocks, kept by their events: which places hold the beginning of a
prompt. Pure.

It keeps own keys of token ids (`keys`), so engines may hash with other algorithms, seeds and block
sizes than each other. Per place it maps the engine's hash of a block to the block's key, for
removals and for events that name a parent.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from pdproxy.scheduling.prefix import reading
from pdproxy.scheduling.prefix.counters import Counters
from pdproxy.scheduling.prefix.held import Held, IndexPlace, all_keys, known_of, size_of, sizes_of
from pdproxy.scheduling.prefix.keys import MASK, TOKEN_BYTES, chain, following, pack, root
from pdproxy.scheduling.prefix.matches import (
    Bits,
    KeyBits,
    Matches,
    Steps,
    ended_runs,
    ended_runs_anywhere,
)
from pdproxy.scheduling.prefix.reading import GPU, BlockEntries, BlockHash, OddEventError, Value

_AT_ONCE = 64
"""Entries that are removed in one go where nothing forces it: some ten microseconds."""
_MAX_ASKED = 16
"""Requests of one place that asked for a report which has not come."""
_WAITING = 64
"""Places' former contents that may wait to be removed."""


class BlockIndex:
    """Keys of `unit` tokens each; `max_blocks`: how many blocks of all places are kept at most.

    Engines' block sizes may be multiples of `unit`, or parts of it. A block of several units counts
    as several. With parts a unit counts as held while the block is that ends it. Blocks of an
    unknown place are ignored: events may be late.

    Engines have equal blocks several times: those that were loaded from other engines at the same
    time. Each is stored and removed by itself. A request with `kv_cache_report_mode: full` makes
    its engine report the blocks that it reuses, from the prompt's first one on, by an event that
    looks like one about more equal blocks. Taken for those, the blocks would stay for ever. So
    `asked` has to be called before such a request is sent.

    `others_ask`: other proxies ask, too, whose requests are not known here. Then all that starts at
    a prompt's first block is taken for a report: the first removal of one of several equal blocks
    counts for all.
    """

    def __init__(self, unit: int, max_blocks: int, *, others_ask: bool = False) -> None:
        self.unit = unit
        self.max_blocks = max_blocks
        self._others_ask = others_ask
        self.counters = Counters()
        """Read only."""
        self._numbers = itertools.count()
        self._bits = Bits()
        self._places: dict[int, IndexPlace] = {}
        self._unit_bytes = unit * TOKEN_BYTES
        self._gpu = KeyBits()
        self._media = {GPU: self._gpu}
        self._size = 0
        self._leaving: deque[tuple[int, dict[str, Held]]] = deque()
        """Bits that are retired, with what they held."""

    def __len__(self) -> int:
        """The number of blocks, of all places and memories, also those that wait to be removed. Of
        several units: several.
        """
        return self._size

    # -- places

    def add_place(self) -> int:
        """Return the number of a new place. Numbers are not used again."""
        number = next(self._numbers)
        self._places[number] = IndexPlace(self._bits.take(number))
        return number

    def remove_place(self, place: int) -> None:
        """Forget a place and what it held."""
        if one := self._places.pop(place, None):
            self._retire(one)

    def restart(self, place: int) -> None:
        """Forget all about a place's contents: its engine was started again."""
        if one := self._places.get(place):
            one.group = None
            self._empty(place, one)

    def cleared(self, place: int) -> None:
        """Note that a place holds nothing any more (AllBlocksCleared)."""
        if one := self._places.get(place):
            self._empty(place, one)

    def asked(self, place: int, key: int | None) -> None:
        """Note that a request is sent which asks a place to report what it reuses. `key`: the first
        one of its prompt, None if that has none.
        """
        one = self._places.get(place)
        if one is not None and key is not None:
            one.asked[key] = None
            if len(one.asked) > _MAX_ASKED:
                del one.asked[next(iter(one.asked))]

    def blocks(self, place: int) -> int:
        """Return how many blocks are known of a place, in all its memories."""
        one = self._places.get(place)
        return one.blocks() if one else 0

    def distinct(self) -> int:
        """Return how many different keys are held."""
        return sum(map(len, self._media.values()))

    # -- events

    def stored(
        self,
        place: int,
        block_hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        token_ids: Sequence[int],
        block_size: int,
        medium: str,
        group: int,
        lora_name: str | None,
        extra_keys: Sequence[Sequence[Any] | None] | None,
        *,
        counts: bool,
        from_start: bool = False,
    ) -> None:
        """Enter blocks of a BlockStored event. `counts`: the group's attention is full, so its
        blocks decide about hits.

        `from_start`: they are a part of an event that begins with a prompt's first block.
        """
        one = self._places.get(place)
        count = len(block_hashes)
        if one is None or not count:
            return
        if (
            counts
            and medium == GPU
            and group == one.group
            and block_size == self.unit
            and len(token_ids) == count * block_size
            and not self._leaving
            and self._size + count <= self.max_blocks
            and (
                not extra_keys
                or extra_keys.count(None) == count
                or extra_keys.count((lora_name,)) == count
            )
            and self._enter_new(one, reading.folded(block_hashes), parent, token_ids, lora_name)
        ):
            return  # so are nearly all events; what follows takes three times as long
        if self._leaving:
            self.tidy(2 * count + _AT_ONCE)
        medium = reading.medium_of(medium)
        # vLLM's offloading does not say which groups count
        if counts and one.group is None and medium == GPU:
            one.group = group
        if not counts or group != one.group:
            self.counters.not_counted += count
            return
        hashes = reading.folded(block_hashes)
        if parent is None:
            one.reports = self._others_ask
        begin = None
        if token_ids and block_size > 0:
            if parent is None:
                begin = reading.first(lora_name, extra_keys)
            elif found := one.find(reading.folded((parent,))[0]):
                begin = found[1]
        # A block that is known has its keys. Events about other memories may lack tokens, adapters
        # and extra keys.
        known = medium != GPU or begin is None
        entries = known_of(one, hashes) if known else BlockEntries([], [], {})
        missing = count - len(entries.hashes)
        if begin is not None and missing:
            try:
                entries = reading.read(
                    begin,
                    hashes,
                    token_ids,
                    block_size,
                    self.unit,
                    lora_name,
                    extra_keys,
                    at_start=parent is None,
                )
            except OddEventError:
                self.counters.odd += count
                return
            if parent is None and one.asked and (keys := all_keys(entries.values)):
                one.reports |= one.has_come(keys[0])
        elif token_ids:
            self.counters.unknown_parent += missing
        else:
            self.counters.unknown_block += missing
        starts = from_start or parent is None
        self._enter(one, medium, entries, is_report=starts and medium == GPU and one.reports)

    def removed(
        self, place: int, block_hashes: Sequence[BlockHash], medium: str, group: int
    ) -> Sequence[int]:
        """Take out blocks of a BlockRemoved event. Return their keys."""
        one = self._places.get(place)
        if one is None:
            return ()
        if group != one.group:
            self.counters.not_counted += len(block_hashes)
            return ()
        medium = reading.medium_of(medium)
        held = one.held.get(medium)
        if held is None:
            self.counters.unknown_block += len(block_hashes)
            return ()
        gone: list[int] = []
        entries, size, copies = 0, 0, held.copies
        for block in reading.folded(block_hashes):
            if copies and block in copies:
                copies[block] -= 1
                if not copies[block]:
                    del copies[block]
                continue
            value = held.values.pop(block, None)
            if value is None:
                self.counters.unknown_block += 1
                continue
            entries += 1
            size += size_of(value)
            if isinstance(value, int):
                gone.append(value)
            elif value:
                gone.extend(held.released(value))
            else:
                del held.ends[block]
        self._media[medium].discard(gone, one.bit)
        held.size -= size
        self._size -= size
        self.counters.removed += entries
        return gone

    def disproved(self, place: int, steps: Steps, units: int) -> None:
        """Note that a place turned out to hold no more than `units` of a prompt: its removals were
        lost, or are on their way.

        What follows matches no more at this place until its engine reports it again. Not for
        prompts whose engine may not look into its cache, such as those with `prompt_logprobs`.
        """
        one = self._places.get(place)
        if one is None:
            return
        at = 0
        for step in steps:
            wrong = step[max(units - at, 0) :]
            at += len(step)
            held = False
            for keys in self._media.values():
                held |= keys.discard(wrong, one.bit)
            if wrong and not held:
                return  # nor anything behind it, as far as a search would go

    # -- questions

    def lookup(self, steps: Steps) -> Matches:
        """Return how much of a prompt's beginning each place holds. `steps`: its keys, of this
        index's unit.
        """
        gpu, *others = self._media.values()
        if not others:
            runs = self._bits.runs(ended_runs(steps, gpu, self._bits.live))
            return Matches(runs, runs)
        in_gpu, anywhere = ended_runs_anywhere(steps, gpu, others, self._bits.live)
        return Matches(self._bits.runs(in_gpu), self._bits.runs(anywhere))

    def tidy(self, limit: int) -> bool:
        """Remove up to `limit` blocks of places that are gone or empty. Return whether there are
        more.

        Such blocks match nothing already. Events cause this as well: without any, a timer may.
        """
        while self._leaving and limit > 0:
            bit, media = self._leaving[0]
            medium, held = next(iter(media.items()))
            limit -= self._drop(medium, held, bit, limit)
            if not held.values:
                del media[medium]
            if not media:
                self._leaving.popleft()
                self._bits.free(bit)
        return bool(self._leaving)

    # -- inside

    def _enter_new(
        self,
        one: IndexPlace,
        hashes: list[int],
        parent: BlockHash | None,
        token_ids: Sequence[int],
        lora_name: str | None,
    ) -> bool:
        """Enter blocks of one unit each if all are new, and the one before them is known. Return
        whether they were.
        """
        held = one.held.get(GPU)
        if held is None:
            return False
        known = held.values
        key: Value | None
        if parent is None:
            key = root(lora_name)
        else:
            key = known.get(
                parent & MASK if isinstance(parent, int) else reading.folded((parent,))[0]
            )
        if not isinstance(key, int) or not known.keys().isdisjoint(hashes):
            return False
        count = len(hashes)
        if count > 1 and len(set(hashes)) < count:
            return False
        try:
            data = pack(token_ids)
        except (OverflowError, TypeError):
            return False
        if count == 1:  # what decoding adds
            key = following(key, data)
            keys = [key]
            known[hashes[0]] = key
        else:
            keys = chain(key, data, self._unit_bytes)
            known.update(zip(hashes, keys, strict=True))
        if parent is None:
            one.reports = self._others_ask or one.has_come(keys[0])
        self._gpu.add(keys, one.bit)
        held.size += count
        self._size += count
        self.counters.stored += count
        return True

    def _enter(
        self, one: IndexPlace, medium: str, entries: BlockEntries, *, is_report: bool
    ) -> None:
        """Enter blocks. `is_report`: those that are known are merely reported once more."""
        if self._size + sizes_of(entries.values) > self.max_blocks:
            entries = self._fitting(one, medium, entries)
        if not entries.hashes:
            return
        hashes, values, ends = entries
        if (held := one.held.get(medium)) is None:
            held = one.held[medium] = Held()
        if (keys := self._media.get(medium)) is None:
            keys = self._media[medium] = KeyBits()
        known = held.values
        before = len(known)
        new = dict(zip(hashes, values, strict=True))
        if len(new) == len(hashes) and known.keys().isdisjoint(new):
            fresh = values
            known.update(new)
        else:
            # of equal hashes the first one counts
            new = dict(zip(reversed(hashes), reversed(values), strict=True))
            fresh = [value for block, value in new.items() if block not in known]
            again = []
            first_values: list[Value] = []
            for block, value in zip(hashes, values, strict=True):
                if block in known:
                    again.append(block)
                first_values.append(known.setdefault(block, value))
            values = first_values
            # Engines don't join equal blocks that they computed at the same time: each is stored
            # and removed by itself.
            if not is_report:
                for block in again:
                    held.copies[block] = held.copies.get(block, 0) + 1
            self.counters.repeated += len(again)
        for at, end in ends.items():
            if known[hashes[at]] == ():
                held.ends.setdefault(hashes[at], end)
        if not isinstance(values[0], int):
            held.share(keys, fresh, one.bit)
        keys.add(all_keys(values), one.bit)
        size = sizes_of(fresh)
        held.size += size
        self._size += size
        self.counters.stored += len(known) - before

    def _drop(self, medium: str, held: Held, bit: int, limit: int) -> int:
        """Take out the newest blocks, of a size of `limit` or little more. Return their size."""
        before = held.size
        values: list[Value] = []
        while held.values and before - held.size < limit:
            values.append(held.pop())
        self._media[medium].discard(all_keys(values), bit)
        self._size -= before - held.size
        return before - held.size

    def _retire(self, one: IndexPlace) -> None:
        """Let what a place holds match nothing any more. Its entries are removed later: they may be
        hundreds of thousands.
        """
        self._bits.retire(one.bit)
        media = {medium: held for medium, held in one.held.items() if held.values}
        if not media:
            self._bits.free(one.bit)
            return
        self._leaving.append((one.bit, media))
        self.tidy(_AT_ONCE)
        while len(self._leaving) > _WAITING:
            sizes = [sum(held.size for held in media.values()) for _, media in self._leaving]
            # the largest may have millions of blocks
            self._leaving.rotate(-sizes.index(min(sizes)))
            self.tidy(min(sizes))

    def _empty(self, number: int, one: IndexPlace) -> None:
        if one.blocks():
            self._retire(one)
            one.bit = self._bits.take(number)
        one.held = {}

    def _fitting(self, one: IndexPlace, medium: str, entries: BlockEntries) -> BlockEntries:
        """Return the first ones of these blocks, as many as there is space for."""
        known = one.held[medium].values if medium in one.held else {}
        hashes, values, ends = entries
        sizes = [
            0 if block in known else size_of(value)
            for block, value in zip(hashes, values, strict=True)
        ]
        room = self._room(one, sum(sizes))
        # A block without those before it would be of no use.
        end = next(
            (at for at, size in enumerate(itertools.accumulate(sizes)) if size > room), len(sizes)
        )
        self.counters.no_space += len(sizes[end:]) - sizes[end:].count(0)
        return BlockEntries(
            hashes[:end], values[:end], {at: found for at, found in ends.items() if at < end}
        )

    def _room(self, one: IndexPlace, wanted: int) -> int:
        """Return how much of a wanted size a place may enter.

        Without space a place takes it from the place with the most blocks, up to an equal share of
        all.
        """
        free = self.max_blocks - self._size
        if free >= wanted:
            return wanted
        self.tidy(wanted - free)
        share = self.max_blocks // len(self._places)
        wanted = min(wanted, max(share - one.size(), self.max_blocks - self._size))
        while (missing := wanted - (self.max_blocks - self._size)) > 0:
            largest = max(self._places.values(), key=IndexPlace.size)
            most = largest.size() - share
            if most <= 0:
                return self.max_blocks - self._size
            medium, held = max(largest.held.items(), key=lambda item: item[1].size)
            blocks = len(held.values)
            self._drop(medium, held, largest.bit, min(max(missing, _AT_ONCE), most))
            self.counters.no_space += blocks - len(held.values)
        return wanted
