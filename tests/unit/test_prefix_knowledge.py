"""What is known of engines' caches from all indexes together, and what answers change of it."""

import msgspec
import pytest

from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import EngineSpec, LedgerEngine, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.prefix import keys
from pdproxy.scheduling.prefix.block_index import BlockIndex
from pdproxy.scheduling.prefix.knowledge import (
    EVENTS,
    FRESH,
    ROUTING,
    TEXT,
    FedIndex,
    Knowledge,
)
from pdproxy.scheduling.prefix.prediction import Prediction
from pdproxy.scheduling.prefix.prompts import MAX_KEYS, beginning_of
from pdproxy.scheduling.prefix.refreshing import GAP, MOST, REFUSALS, Refreshing
from pdproxy.scheduling.prefix.routed import RoutedIndex
from pdproxy.scheduling.prefix.speculative import SpeculativeIndex
from pdproxy.serving.dispatch.prefixes import reporting
from pdproxy.tokens.ids import from_numbers
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route

UNIT, TTL = 16, 2.0
FED, OTHER = "http://fed:1", "http://other:1"


class World:
    """Knowledge of one engine that publishes events, and of one that does not."""

    def __init__(self, block_size=UNIT, ranks=1):
        self.now = 100.0
        self.knowledge = Knowledge(
            UNIT,
            BlockIndex(UNIT, 10_000),
            RoutedIndex(1000),
            SpeculativeIndex(TTL, 10_000),
            Refreshing(),
        )
        self.index = FedIndex(self.knowledge)
        for url in (FED, OTHER):
            self.knowledge.add(url, block_size, 500)
        self.places = {(FED, rank): self.index.add_place() for rank in range(ranks)}
        self.knowledge.places = self.places
        self.hashes = {}

    def stored(self, tokens, rank=0):
        """The engine reports the whole blocks of a prompt."""
        whole = tokens[: len(tokens) // UNIT * UNIT]
        hashes = [
            hash(tuple(tokens[: at + UNIT])) & (2**64 - 1) for at in range(0, len(whole), UNIT)
        ]
        self.index.stored(
            self.places[FED, rank], hashes, None, whole, UNIT, "GPU", 0, None, None, counts=True
        )
        return hashes

    def begin(self, tokens):
        self.now += FRESH + 0.01
        parsed = parse(Route.COMPLETIONS, msgspec.json.encode({"model": "m", "prompt": tokens}))
        return beginning_of(parsed, parsed.prompts[0], None, UNIT, is_adapter=False)

    def cached(self, tokens):
        return self.knowledge.cached(Ask("m", 1, self.now, beginning=self.begin(tokens)))

    def sent(self, tokens, url=FED, **more):
        return self.knowledge.routed(self.begin(tokens), url, self.now, **more)

    def served(self, tokens, reported, url=FED):
        prediction = self.sent(tokens, url)
        self.knowledge.answered(prediction, reported, len(tokens))
        return prediction

    def later(self):
        """So much later that nothing was just sent."""
        self.now += 3 * TTL


def prompt(number, size=100):
    return [number, *range(1000, 999 + size)]


def test_an_ask_without_a_beginning_finds_nothing():
    world = World()
    world.stored(prompt(1))
    assert world.knowledge.cached(Ask("m", 1, 0.0)) == {}


def test_events_and_what_was_just_sent_and_routing_answer_together():
    world = World()
    world.stored(prompt(1)[:48])
    assert world.cached(prompt(1)) == {FED: 48}
    world.sent(prompt(1))
    world.sent(prompt(1), OTHER)
    assert world.cached([*prompt(1)[:80], 5, 6]) == {FED: 80, OTHER: 80}
    world.later()
    assert world.cached([*prompt(1)[:80], 5, 6]) == {FED: 48, OTHER: 80}


def test_one_search_per_request():
    world = World()
    beginning = world.begin(prompt(1))
    ask = Ask("m", 1, world.now, beginning=beginning)
    assert world.knowledge.cached(ask) is world.knowledge.cached(ask)
    world.stored(prompt(1))
    assert world.knowledge.cached(ask) == {}
    later = msgspec.structs.replace(ask, now=world.now + FRESH + 0.1)
    assert world.knowledge.cached(later) == {FED: 96}


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_engines_use_whole_blocks_of_their_own_and_compute_the_last_token(block_size):
    world = World(block_size)
    world.stored(prompt(1, 128))
    assert world.cached(prompt(1, 128)) == {FED: 127 // block_size * block_size}
    assert world.cached([*prompt(1, 128), 7]) == {FED: 128}


def test_what_was_just_sent_may_be_evicted_already():
    world = World()
    world.sent(prompt(1))
    hashes = world.stored(prompt(1))
    world.index.removed(world.places[FED, 0], hashes[2:], "GPU", 0)
    assert world.cached(prompt(1)) == {FED: 32}


def test_what_was_just_sent_is_in_the_gpu_whatever_other_memory_drops():
    world = World()
    hashes, place = world.stored(prompt(1)), world.places[FED, 0]
    world.index.stored(place, hashes, None, [], 0, "CPU", 0, None, None, counts=True)
    world.index.removed(place, hashes, "GPU", 0)
    world.sent(prompt(1))
    world.index.removed(place, hashes, "CPU", 0)
    assert world.cached(prompt(1)) == {FED: 96}


@pytest.mark.parametrize("how", ["cleared", "restart", "restarted", "remove"])
def test_what_is_over_is_forgotten(how):
    world = World()
    world.stored(prompt(1))
    for url in (FED, OTHER):
        world.sent(prompt(1), url)
    if how in ("cleared", "restart"):
        getattr(world.index, how)(world.places[FED, 0])
        assert world.cached(prompt(1)) == {OTHER: 96}
    else:
        getattr(world.knowledge, how)(OTHER)
        assert world.cached(prompt(1)) == {FED: 96}
        assert (world.sent(prompt(1), OTHER) is None) == (how == "remove")
        while world.knowledge.tidy(3):
            pass
        assert world.cached(prompt(2)) == {}


def test_an_engine_whose_events_come_is_known_by_them_alone():
    world = World()
    world.sent(prompt(1), OTHER)
    world.places[OTHER, 0] = world.index.add_place()
    assert world.cached(prompt(1)) == {}
    assert world.sent(prompt(1), OTHER).basis == EVENTS
    world.index.remove_place(world.places.pop((OTHER, 0)))
    assert world.sent(prompt(1), OTHER).basis == ROUTING


def test_while_an_engines_events_do_not_come_what_was_sent_counts():
    world = World()
    lost: set[str] = {FED}
    world.knowledge.connected = lambda url: url not in lost
    assert world.served(prompt(1), 0).basis == ROUTING
    world.later()
    assert world.cached(prompt(1)) == {FED: 96}
    lost.clear()
    assert world.cached(prompt(1)) == {}
    world.stored(prompt(1)[:48])
    assert world.sent(prompt(1)).basis == EVENTS
    world.later()
    assert world.cached(prompt(1)) == {FED: 48}
    world.knowledge.remove(FED)
    assert world.cached(prompt(1)) == {}


def test_how_right_it_was_is_counted_by_what_it_is_based_on():
    world = World()
    world.served(prompt(1), 0)
    world.stored(prompt(1))
    world.served(prompt(1), 96)
    world.served(prompt(1), 48, OTHER)
    events, routing = world.knowledge.scores[EVENTS], world.knowledge.scores[ROUTING]
    assert (events.exact, events.predicted, events.reported) == (2, 96, 96)
    assert (routing.too_low, routing.under) == (1, 48)


def test_what_shows_nothing_is_not_compared():
    world = World()
    world.stored(prompt(1))
    for prediction in (
        world.sent(prompt(1), reports=False),
        world.sent(list(range(MAX_KEYS * UNIT + 1))),
    ):
        world.knowledge.answered(prediction, 0, 100)
    world.knowledge.answered(world.sent(prompt(1)), 101, 100)
    several = World(ranks=2)
    several.stored(prompt(1), 1)
    assert several.cached(prompt(1)) == {FED: 96}
    several.served(prompt(1), 0)
    for one in (world, several):
        score = one.knowledge.scores[EVENTS]
        assert (score.exact, score.too_high, score.too_low) == (0, 0, 0)


def test_events_that_are_wrong_twice_are_dropped():
    """Once, an engine has evicted a prompt meanwhile; it holds it again after its answer."""
    world = World()
    world.stored(prompt(1))
    world.served(prompt(1), 32)
    assert world.cached(prompt(1)) == {FED: 96}
    world.served(prompt(1), 32)
    assert world.cached(prompt(1)) == {FED: 32}
    assert world.knowledge.disproved == 1


def test_an_engine_that_drops_the_last_block_is_known_after_some_answers():
    world = World()
    world.stored(prompt(1))
    for _ in range(4):
        assert world.served(prompt(1), 80).tokens == 96
    for _ in range(4):
        assert world.served(prompt(1), 80).tokens == 80
    for _ in range(4):
        assert world.served(prompt(1), 96).tokens == 80
    assert world.served(prompt(1), 96).tokens == 96


def test_a_request_asks_for_what_was_not_known():
    world = World()
    world.stored(prompt(1)[:32])
    assert not world.served(prompt(1), 96).refreshes
    world.later()
    assert not world.sent(prompt(2)).refreshes
    assert not world.sent(prompt(1), OTHER).refreshes
    asking = world.sent(prompt(1))
    assert asking.refreshes
    hashes = world.stored(prompt(1))  # the report
    world.knowledge.answered(asking, 96, 100)
    world.later()
    assert not world.sent(prompt(1)).refreshes
    assert world.knowledge.refreshing.asked == 1
    world.later()
    assert world.cached(prompt(1))[FED] == 96
    world.index.removed(world.places[FED, 0], hashes, "GPU", 0)
    assert FED not in world.cached(prompt(1)), "what was reported once more is no copy"


def test_what_the_unit_hides_is_not_asked_for():
    """An engine's blocks may be smaller than the unit: of its last ones nothing is known, whatever
    it reports.
    """
    world = World(block_size=4)
    world.stored(prompt(1))
    assert world.served(prompt(1)[:94], 92).tokens == 80
    world.later()
    assert not world.sent(prompt(1)[:94]).refreshes
    assert world.served(prompt(1)[:94], 40).tokens == 80
    world.served(prompt(2), 16)
    world.later()
    assert world.sent(prompt(2)).refreshes


def test_what_a_full_index_can_not_take_is_not_asked_for():
    world = World()
    world.stored(prompt(1)[:32])
    for max_blocks, refreshes in ((2, False), (3, True)):
        world.knowledge.blocks.max_blocks = max_blocks
        world.served(prompt(1), 96)
        world.later()
        assert world.sent(prompt(1)).refreshes == refreshes
        world.later()


def test_a_decode_engine_that_gets_the_kv_is_asked_nothing():
    """Its request could not carry the field, and its answer says nothing of its own cache."""
    world = World()
    world.stored(prompt(1)[:32])
    world.served(prompt(1), 96)
    world.later()
    split = ((OTHER, Role.PREFILL), (FED, Role.DECODE))
    leases = [
        Lease(LedgerEngine(EngineSpec(url, role), run_number=0), role, 0) for url, role in split
    ]
    world.knowledge.sent(world.begin(prompt(1)), leases, world.now)
    made = [(lease.prediction, lease.reports) for lease in leases]
    assert [(one and (one.url, one.scored), reports) for one, reports in made] == [
        ((OTHER, True), False),
        ((FED, False), False),
    ]
    assert world.knowledge.refreshing.asked == 0
    world.knowledge.sent(world.begin(prompt(1)), leases[1:], world.now)
    alone = leases[1]
    assert alone.prediction is not None
    assert (alone.prediction.scored, alone.reports) == (True, True)


def test_refreshing_is_bounded():
    refreshing = Refreshing()
    for key in range(MOST + 10):
        refreshing.wanted("a", key)
    assert not refreshing.due("a", [[0, 9]], 1.0)
    assert refreshing.due("a", [[0], [10, 11]], 1.0)
    assert not refreshing.due("a", [[12]], 1.0 + GAP / 2)
    assert not refreshing.due("a", [[10, 11]], 2.0)
    assert refreshing.due("a", [[12]], 2.0)
    for refusals in (REFUSALS - 1, 1):
        refreshing.accepted("a")
        for _ in range(refusals):
            refreshing.refuses("a")
    refreshing.wanted("a", 13)
    assert refreshing.due("a", [[13, 14]], 3.0)
    refreshing.wanted("a", 13)
    for _ in range(REFUSALS - 1):
        refreshing.refuses("a")
    assert not refreshing.due("a", [[13]], 4.0)
    refreshing.wanted("a", 13)
    assert not refreshing.due("a", [[13]], 5.0)
    refreshing.forget("a")
    refreshing.wanted("a", 13)
    assert refreshing.due("a", [[13]], 6.0)
    assert (refreshing.asked, refreshing.refused) == (4, 2 * REFUSALS - 1)


# -- what prompts are known by


def beginning(route=Route.COMPLETIONS, ids=None, adapter=False, **fields):
    parsed = parse(route, msgspec.json.encode({"model": "m", **fields}))
    return beginning_of(parsed, parsed.prompts[0], ids, UNIT, is_adapter=adapter)


def all_keys(**fields):
    return beginning(**fields).keys.all()


def test_ids_of_clients_and_own_ids_are_the_same():
    given = all_keys(prompt=prompt(1))
    assert given == all_keys(prompt="text", ids=from_numbers(prompt(1)))
    assert given == keys.of_ids(prompt(1), UNIT, keys.root()).all()


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"adapter": True}, {"prompt": "text"}])
def test_salts_adapters_and_texts_are_apart(other):
    assert not set(all_keys(prompt=prompt(1))) & set(all_keys(**{"prompt": prompt(1), **other}))


def test_no_salt_may_be_spelled_null():
    assert all_keys(prompt=prompt(1), cache_salt=None) == all_keys(prompt=prompt(1))


@pytest.mark.parametrize(
    "fields",
    [{"truncate_prompt_tokens": 10}, {"cache_salt": 5}, {"cache_salt": "s" * 2000}],
    ids=str,
)
def test_nothing_is_known_of_prompts_that_engines_change(fields):
    assert beginning(prompt=prompt(1), **fields) is None


def test_chats_that_go_on_begin_alike():
    def chat(*texts, **more):
        messages = [{"role": "user", "content": text} for text in texts]
        return all_keys(route=Route.CHAT, messages=messages, **more)

    long = "All ships that came in. " * 30
    first, second = chat(long), chat(long, "and then?")
    assert first[:-1] == second[: len(first) - 1]
    assert len(first) > 8
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert not set(first) & set(chat(long, tools=tools))


def test_a_prompts_keys_are_bounded():
    long = beginning(prompt=list(range(MAX_KEYS * UNIT + 500)))
    assert len(long.keys.all()) == MAX_KEYS
    assert long.is_long
    text = beginning(prompt="x" * (MAX_KEYS * UNIT * 4 + 999))
    assert len(text.keys.all()) == MAX_KEYS
    assert text.of_text
    assert text.tokens == MAX_KEYS * UNIT + 250


def test_texts_say_how_much_of_an_engine_that_was_sent_them():
    world = World()
    parsed = parse(Route.COMPLETIONS, msgspec.json.encode({"model": "m", "prompt": "a" * 6398}))

    def made():
        world.now += FRESH + 0.01
        return beginning_of(
            parsed,
            parsed.prompts[0],
            None,
            UNIT,
            is_adapter=False,
            text_per_token=world.knowledge.text_per_token,
        )

    def predicted() -> Prediction:
        found = world.knowledge.routed(made(), FED, world.now)
        assert found is not None
        return found

    assert predicted().basis == TEXT
    for _ in range(300):
        world.knowledge.answered(predicted(), 700, 800)
    assert 7.5 < world.knowledge.text_per_token < 8.1
    assert 700 < world.knowledge.found(made(), world.now)[FED] < 850
    world.knowledge.answered(predicted(), 0, 800)
    assert world.knowledge.found(made(), world.now) == {}


# -- the field that asks for reports


@pytest.mark.parametrize(
    ("own", "sent"),
    [
        ({}, {"kv_cache_report_mode": "full"}),
        ({"vllm_xargs": None}, {"kv_cache_report_mode": "full"}),
        ({"vllm_xargs": {}}, {"kv_cache_report_mode": "full"}),
        (
            {"vllm_xargs": {"a": [1, "}"], "b": "}"}},
            {"a": [1, "}"], "b": "}", "kv_cache_report_mode": "full"},
        ),
        (
            {"vllm_xargs": {"kv_cache_report_mode": "incremental"}},
            {"kv_cache_report_mode": "incremental"},
        ),
        ({"vllm_xargs": "odd"}, "odd"),
        ({"vllm_xargs": [1]}, [1]),
    ],
    ids=str,
)
def test_the_field_joins_the_clients_own(own, sent):
    parsed = parse(Route.COMPLETIONS, msgspec.json.encode({"model": "m", "prompt": "p", **own}))
    before = dict(parsed.fields)
    assert msgspec.json.decode(reporting(parsed).fields["vllm_xargs"]) == sent
    assert parsed.fields == before


def test_a_refusal_that_comes_behind_the_removal_of_its_engine_is_not_kept():
    """Engines with ever other addresses leave nothing."""
    world = World()
    for number in range(50):
        url = f"http://engine-{number}:1"
        world.knowledge.add(url, UNIT, 500)
        world.knowledge.refuses_reports(url)
        world.knowledge.remove(url)
        world.knowledge.refuses_reports(url)
    world.knowledge.refuses_reports(FED)
    assert world.knowledge.refreshing._refusals == {FED: 1}


def test_a_large_field_of_a_client_stays_as_it_is():
    parsed = parse(
        Route.COMPLETIONS, msgspec.json.encode({"prompt": "p", "vllm_xargs": {"a": "x" * 70_000}})
    )
    assert reporting(parsed) is parsed


def test_an_empty_object_with_spaces_is_empty():
    parsed = parse(Route.COMPLETIONS, b'{"prompt": "p", "vllm_xargs": { }}')
    assert msgspec.json.decode(reporting(parsed).fields["vllm_xargs"]) == {
        "kv_cache_report_mode": "full"
    }
