"""What vLLM's ExampleConnector does with storage that engines share, and where it dies of it, in
virtual time.
"""

from typing import Any

import pytest

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.folder import FolderStorage
from pdproxy_lab.sim.storage import MemoryStorage, key_of
from tests.sim.engines import OTHER, PREFILL, PROMPT, Engines, plain

SIZE = 32
LONG = tuple(range(300, 1400))


def sources(engine):
    return {name: count for name, count in engine.stats.prompt_tokens_by_source.items() if count}


class Pair(Engines):
    """Two engines with one storage."""

    def __init__(self, **facts):
        super().__init__()
        usual: dict[str, Any] = {"connector": "shared", "block_size": SIZE} | facts
        self.p, self.d = (
            self.add(SimFacts(role="prefill", **usual)),
            self.add(SimFacts(role="decode", **usual)),
        )

    def __len__(self):
        return len(self._storage)

    def split(self, prompt):
        self.answer(self.p, prompt, 1)
        return self.answer(self.d, prompt).tokens


@pytest.fixture
def pair():
    return Pair()


@pytest.mark.parametrize(
    ("length", "found"), [(535, 512), (984, 960), (291, 288), (454, 448), (2, 0)]
)
def test_prompts_are_found_as_recorded(pair, length, found):
    assert pair.split(LONG[:length]) == plain(LONG[:length])
    said = {"local_compute": length - found} | ({"external_kv_transfer": found} if found else {})
    assert sources(pair.d) == said
    assert len(pair) == 1
    assert pair.d.stats.external_prefix_cache_hits == found


def test_parameters_say_nothing_and_none_are_answered(pair):
    """Recorded: P's `kv_transfer_params` None, whatever it was sent."""
    assert pair.answer(pair.p, PROMPT, 1, dict(PREFILL)).outputs[-1].kv_transfer_params is None
    assert len(pair) == 1


def test_decode_alone_stores(pair):
    assert pair.answer(pair.d).tokens == plain()
    assert sources(pair.d) == {"local_compute": 100}
    assert len(pair) == 1


def test_what_decode_has_cached_is_not_loaded(pair):
    pair.split(PROMPT)
    pair.answer(pair.d)
    assert sources(pair.d) == {
        "local_compute": 8,
        "external_kv_transfer": 96,
        "local_cache_hit": 96,
    }


def test_a_longer_prompt_finds_nothing(pair):
    pair.answer(pair.p, PROMPT, 1)
    prompt = PROMPT + OTHER
    assert pair.answer(pair.d, prompt).tokens == plain(prompt)
    assert sources(pair.d) == {"local_compute": 200}
    assert len(pair) == 2


def test_one_token_more_than_whole_blocks_is_never_found(pair):
    prompt = PROMPT[:65]
    assert pair.split(prompt) == plain(prompt)
    assert sources(pair.d) == {"local_compute": 65}


def test_neither_model_nor_salt_keep_prompts_apart():
    engines = Engines()
    p = engines.add(SimFacts(connector="shared", model="a", block_size=SIZE))
    d = engines.add(SimFacts(connector="shared", model="b", block_size=SIZE))
    engines.answer(p, PROMPT, 1, cache_salt="x")
    run = engines.answer(d, PROMPT, cache_salt="y")
    assert run.over == "length"
    assert run.tokens != plain(PROMPT, model="b")


def test_loading_what_was_looked_for_one_block_shorter_kills_the_engine(pair):
    pair.answer(pair.p, PROMPT[:60], 1)
    assert pair.answer(pair.d, PROMPT[:65]).over == "error"
    assert pair.d.dead


def test_a_prompt_of_several_steps_kills_who_loads_it():
    pair = Pair(max_num_batched_tokens=64)
    assert pair.answer(pair.p, PROMPT, 1).over == "length"
    assert pair.answer(pair.d).over == "error"
    assert pair.d.dead


def test_both_storages_keep_pages(tmp_path):
    for storage in (MemoryStorage(), FolderStorage(str(tmp_path / "new"))):
        key = key_of((1, 2, 3))
        assert not storage.has(key)
        assert storage.get(key) is None
        pages = [((1 << 64) - 1, (1, 2, 3)), (5, ())]
        storage.put(key, pages)
        assert storage.has(key)
        assert list(storage.get(key) or ()) == pages
    assert len(list((tmp_path / "new").iterdir())) == 1
    assert FolderStorage(str(tmp_path / "new")).has(key)


def test_keys_are_the_same_in_all_processes():
    assert key_of((1, 2)) == "2440f9ec7b10fb8a3af87796d6d7e00b"
    assert key_of((1, 2)) != key_of((1, 3))
