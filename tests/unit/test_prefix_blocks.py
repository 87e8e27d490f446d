"""The index of engines' blocks, against a model that keeps whole beginnings instead of keys."""

import itertools
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.scheduling.prefix import keys
from pdproxy.scheduling.prefix.block_index import BlockIndex

UNIT = 4
SIZES = (2, 4, 8)
"""Of engines' blocks: half a unit, one, two."""


def hash_of(seed, before, what):
    """Return a block's hash as an engine makes it: of the hash before and all that its KV depends
    on.
    """
    return hash((seed, before, repr(what))) & (2**64 - 1)


def number(block):
    """Return the number that index and engines take for a hash of bytes."""
    return int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block


class Beginning(NamedTuple):
    """What a block's KV depends on: adapter, salt, tokens and extra keys in order."""

    lora: str
    salt: str
    items: tuple


class Model:
    """Per place and memory: where blocks end, and the beginnings that are held.

    `unsure`: beginnings that two blocks had under different hashes, of which one was removed. The
    index may drop them with the first block, or keep them for the second one.
    """

    def __init__(self, reports):
        self.reports = reports
        self.places = {}

    def add(self, place):
        self.places[place] = {
            "group": None,
            "blocks": {},
            "copies": {},
            "unsure": {"GPU": set(), "CPU": set()},
        }

    def clear(self, place, *, restart=False):
        group = self.places[place]["group"]
        self.add(place)
        self.places[place]["group"] = None if restart else group

    def find(self, place, block):
        for medium in ("GPU", "CPU"):
            found = self.places[place]["blocks"].get((medium, block))
            if found:
                return found
        return None

    def stored(self, place, blocks, parent, tokens, size, medium, group, lora, extras, *, counts):
        one = self.places[place]
        blocks, parent = [number(block) for block in blocks], number(parent)
        if counts and one["group"] is None and medium == "GPU":
            one["group"] = group
        if not counts or one["group"] != group:
            return
        entries = None
        if medium != "GPU" and all(self.find(place, block) for block in blocks):
            entries = [(block, self.find(place, block)) for block in blocks]
        elif parent is None and tokens:
            salt = (
                extras[0][-1] if extras and extras[0] and isinstance(extras[0][-1], str) else None
            )
            salt = None if extras and extras[0] and len(extras[0]) == 1 and lora else salt
            end = Beginning(lora or "", salt or "", ())
        elif tokens and self.find(place, parent):
            end = self.find(place, parent)[0]
        else:
            entries = [
                (block, self.find(place, block)) for block in blocks if self.find(place, block)
            ]
        if entries is None:
            entries = []
            for at, block in enumerate(blocks):
                extra = (
                    [item for item in (extras[at] or ()) if not isinstance(item, str)]
                    if extras
                    else []
                )
                items = (*end.items, *(("extra", repr(item)) for item in extra))
                begun = len([item for item in items if isinstance(item, int)])
                items += tuple(tokens[at * size : (at + 1) * size])
                end = end._replace(items=items)
                units = [
                    end._replace(items=items[: len(items) - (begun + size - length)])
                    for length in range(begun + 1, begun + size + 1)
                    if length % UNIT == 0
                ]
                entries.append((block, (end, units)))
        again = [(medium, block) for block, _ in entries if (medium, block) in one["blocks"]]
        for block, what in entries:
            known = one["blocks"].setdefault((medium, block), what)
            one["unsure"][medium] -= set(known[1])
        if not self.reports or parent is not None or medium != "GPU":
            for block in again:
                one["copies"][block] = one["copies"].get(block, 0) + 1

    def removed(self, place, blocks, medium, group):
        one = self.places[place]
        if one["group"] != group:
            return
        for block in blocks:
            if one["copies"].get((medium, block)):
                one["copies"][medium, block] -= 1
            elif (medium, block) in one["blocks"]:
                end, units = one["blocks"].pop((medium, block))
                if any(
                    of == medium and other == end for (of, _), (other, _) in one["blocks"].items()
                ):
                    one["unsure"][medium] |= set(units)

    def lookup(self, tokens, lora, salt, *, sure):
        """Return the runs of places; with `sure`, of what they hold for certain."""
        gpu: dict[int, int] = {}
        anywhere: dict[int, int] = {}
        for place, one in self.places.items():
            for runs, media in ((gpu, ("GPU",)), (anywhere, ("GPU", "CPU"))):
                held: set[object] = set()
                for medium in media:
                    units = {
                        unit
                        for (of, _), (_, found) in one["blocks"].items()
                        if of == medium
                        for unit in found
                    }
                    held |= units - one["unsure"][medium] if sure else units
                length = 0
                while (length + 1) * UNIT <= len(tokens):
                    if (lora or "", salt or "", tuple(tokens[: (length + 1) * UNIT])) not in held:
                        break
                    length += 1
                if length:
                    runs[place] = length
        return gpu, anywhere


def check(index):
    """Check what holds in an index after each event."""
    total = 0
    for one in index._places.values():
        for medium, held in one.held.items():
            total += held.size
            assert held.size == sum(
                1 if isinstance(value, int) else len(value) or 1 for value in held.values.values()
            )
            assert set(held.copies) <= set(held.values)
            assert all(count > 0 for count in held.copies.values())
            assert set(held.ends) == {block for block, value in held.values.items() if value == ()}
            keys_of = {
                key
                for value in held.values.values()
                for key in ((value,) if isinstance(value, int) else value)
            }
            for shard in index._media[medium].shards:
                assert all(key in keys_of for key, bits in shard.items() if bits & one.bit)
    leaving = sum(held.size for _, media in index._leaving for held in media.values())
    assert len(index) == total + leaving
    assert len(index) <= index.max_blocks
    owned = index._bits.live
    for bit, _ in index._leaving:
        owned |= bit
    for media in index._media.values():
        for shard in media.shards:
            assert all(bits and not bits & ~owned for bits in shard.values())


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5)
events = st.one_of(
    st.fixed_dictionaries(
        {
            "what": st.just("stored"),
            "place": st.sampled_from([0, 0, 1, 2, 3]),
            "prompt": prompts,
            "from": st.integers(0, 6),
            "lora": st.sampled_from([None, None, "a"]),
            "salt": st.sampled_from([None, None, "s"]),
            "image": st.sampled_from([None, None, None, 0, 1, 2]),
            "medium": st.sampled_from(["GPU", "GPU", "GPU", "CPU"]),
            "group": st.sampled_from([0, 0, 0, 1, 2]),
            "bare": st.booleans(),
            "odd_parent": st.sampled_from([False, False, False, True]),
            "stolen": st.sampled_from([None, None, None, None, 0, 1]),
        }
    ),
    st.fixed_dictionaries(
        {
            "what": st.just("removed"),
            "place": st.sampled_from([0, 0, 1, 2, 3]),
            "blocks": st.lists(st.integers(0, 200), min_size=1, max_size=8),
            "medium": st.sampled_from(["GPU", "GPU", "CPU"]),
            "group": st.sampled_from([0, 0, 1]),
        }
    ),
    st.fixed_dictionaries(
        {
            "what": st.sampled_from(["cleared", "restart", "replaced"]),
            "place": st.sampled_from([0, 0, 1, 2, 3]),
        }
    ),
)


def tokens_of(prompt, size):
    # Blocks that differ only in their last token share all smaller units before it.
    return [token for one in prompt for token in [7] * (size - 1) + [one]]


class World:
    """An index and its model, and four engines with different hashes and sizes of blocks."""

    def __init__(self, max_blocks, sizes, *, reports=True):
        self.index, self.model = BlockIndex(UNIT, max_blocks, others_ask=reports), Model(reports)
        self.sizes = sizes
        self.seeds = [1, 1, 2, 3]
        self.numbers = []
        self.hashes: list[list[int]] = [[], [], [], []]
        for _ in range(4):
            self.numbers.append(self.index.add_place())
            self.model.add(self.numbers[-1])

    def apply(self, event):
        engine = event["place"]
        place, size = self.numbers[engine], self.sizes[engine]
        both = (self.index, self.model)
        if event["what"] == "stored":
            arguments, counts = self.stored(event, engine, size)
            for one in both:
                one.stored(place, *arguments, counts=counts)
        elif event["what"] == "removed":
            known = self.hashes[engine]
            blocks = [
                known[-1 - at % len(known)] if known and at % 9 else at for at in event["blocks"]
            ]
            for one in both:
                one.removed(place, blocks, event["medium"], event["group"])
        elif event["what"] == "cleared":
            self.index.cleared(place)
            self.model.clear(place)
        elif event["what"] == "restart":
            self.index.restart(place)
            self.model.clear(place, restart=True)
        else:
            self.index.remove_place(place)
            del self.model.places[place]
            self.numbers[engine] = self.index.add_place()
            self.model.add(self.numbers[engine])

    def stored(self, event, engine, size):
        """Return the arguments of `stored`, as an engine with these blocks would send them."""
        prompt, tokens = event["prompt"], tokens_of(event["prompt"], size)
        start = min(event["from"], len(prompt) - 1)
        lora, salt = event["lora"], event["salt"]
        extras, hashes, before = [], [], None
        for at, block in enumerate(prompt):
            extra = [lora] if lora else []
            if event["image"] == at:
                extra.append(("image", 3))
            if at == 0 and salt:
                extra.append(salt)
            extras.append(tuple(extra) or None)
            before = hash_of(self.seeds[engine], before, (block, extra))
            hashes.append(before)
        if event["stolen"] is not None and self.hashes[engine]:
            hashes[-1] = self.hashes[engine][event["stolen"] % len(self.hashes[engine])]
        self.hashes[engine] += hashes[start:]
        parent = hashes[start - 1] if start else None
        if event["odd_parent"]:
            parent = 12345
        tokens, given_extras = tokens[start * size :], extras[start:]
        if event["medium"] == "CPU" and event["bare"]:
            tokens, size, parent = [], 0, None
        if not any(given_extras) and event["bare"]:
            given_extras = []
        # Engines that send bytes or lists instead mean the same.
        as_bytes = (
            (lambda one: b"begun" + one.to_bytes(32, "big")) if engine == 3 else (lambda one: one)
        )
        given = [as_bytes(one) for one in hashes[start:]]
        parent = parent if parent is None else as_bytes(parent)
        counts = event["group"] < 2
        return (
            given,
            parent,
            tokens,
            size,
            event["medium"],
            event["group"],
            lora,
            given_extras or None,
        ), counts


def questions():
    for size in SIZES:
        for prompt in ((0, 0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0), (1, 1, 1, 1), (0, 0, 1, 1)):
            yield tokens_of(prompt, size)


def compare(world, questions):
    for tokens, lora, salt in questions:
        prompt = keys.of_ids(tokens, UNIT, keys.root(lora, salt))
        found = world.index.lookup(prompt)
        least, most = (world.model.lookup(tokens, lora, salt, sure=sure) for sure in (True, False))
        for place in world.numbers:
            for runs, fewest, longest in zip((found.gpu, found.anywhere), least, most, strict=True):
                assert fewest.get(place, 0) <= runs.get(place, 0) <= longest.get(place, 0)
        assert {*found.gpu, *found.anywhere} <= set(world.numbers)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(events, min_size=20, max_size=50),
    st.lists(st.sampled_from(SIZES), min_size=4, max_size=4),
    st.booleans(),
)
def test_it_finds_what_a_model_finds(happened, sizes, reports):
    world = World(10_000, sizes, reports=reports)
    for event in happened:
        world.apply(event)
        check(world.index)
        if "prompt" in event:
            size = sizes[event["place"]]
            compare(world, [(tokens_of(event["prompt"], size), event["lora"], event["salt"])])
    every = itertools.product(questions(), (None, "a"), (None, "s"))
    compare(world, every)


few = st.lists(
    st.tuples(
        st.sampled_from(["stored", "reported", "removed"]),
        st.integers(0, 2),
        st.integers(0, 3),
        st.integers(1, 4),
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(few, st.booleans())
def test_equal_blocks_are_removed_one_by_one(happened, reports):
    """Prompts of one beginning: each block is computed, computed once more, reported and evicted,
    in any order.
    """
    world = World(10_000, [UNIT] * 4, reports=reports)
    place = world.numbers[0]
    held: dict[int, int] = {}
    hashes = [[hash_of(0, prompt if at else 0, at) for at in range(4)] for prompt in range(3)]
    for what, prompt, start, end in happened:
        blocks = hashes[prompt][start:end]
        if what == "removed":
            world.index.removed(place, blocks, "GPU", 0)
            held.update({block: held[block] - 1 for block in blocks if held.get(block)})
        elif blocks and what == "stored" and (not start or held.get(hashes[prompt][start - 1])):
            tokens = tokens_of([prompt if at else 0 for at in range(start, end)], UNIT)
            parent = hashes[prompt][start - 1] if start else None
            world.index.stored(
                place, blocks, parent, tokens, UNIT, "GPU", 0, None, None, counts=True
            )
            for block in blocks:
                held[block] = (
                    held.get(block, 0) + 1 if start or not reports else max(held.get(block, 0), 1)
                )
        elif what == "reported" and all(held.get(block) for block in hashes[prompt][:end]):
            tokens = tokens_of([prompt if at else 0 for at in range(end)], UNIT)
            if not reports:
                (first, *_), *_ = keys.of_ids(tokens, UNIT, keys.root())
                world.index.asked(place, first)
            world.index.stored(
                place, hashes[prompt][:end], None, tokens, UNIT, "GPU", 0, None, None, counts=True
            )
        check(world.index)
    for prompt in range(3):
        tokens = tokens_of([prompt if at else 0 for at in range(4)], UNIT)
        run = next((at for at, block in enumerate(hashes[prompt]) if not held.get(block)), 4)
        assert world.index.lookup(keys.of_ids(tokens, UNIT, keys.root())).gpu.get(place, 0) == run


@settings(max_examples=50, deadline=None)
@given(
    st.lists(events, min_size=20, max_size=50),
    st.integers(1, 12),
    st.lists(st.sampled_from(SIZES), min_size=4, max_size=4),
)
def test_without_space_it_keeps_its_bounds(happened, max_blocks, sizes):
    world = World(max_blocks, sizes)
    for event in happened:
        world.apply(event)
        check(world.index)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(events, min_size=20, max_size=50),
    st.lists(st.sampled_from(SIZES), min_size=4, max_size=4),
)
def test_nothing_stays_of_places_that_are_gone(happened, sizes):
    world = World(10_000, sizes)
    for event in happened:
        world.apply(event)
    for place in world.numbers:
        world.index.remove_place(place)
    while world.index.tidy(3):
        pass
    assert (len(world.index), world.index.distinct(), world.index._bits.live) == (0, 0, 0)
    assert all(
        not world.index.lookup(keys.of_ids(tokens, UNIT, keys.root())).anywhere
        for tokens in questions()
    )
