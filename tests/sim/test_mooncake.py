"""What real engines with Mooncake do, each case of it, in virtual time."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy_lab.sim.facts import MooncakeFacts, SimFacts
from pdproxy_lab.sim.mooncake import Mooncake
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.virtual import VirtualEngine
from tests.sim.engines import OTHER, PROMPT, Engines, Run, plain

LEASE = 480.0


def to_prefill(transfer_id: str = "xfer-1") -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def to_decode(
    transfer_id: str = "xfer-1", engine_id: str = "engine-0", bootstrap: str = "1"
) -> dict[str, Any]:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }


class Pair(Engines):
    """One engine of each role."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self.p = self.add(SimFacts(role="prefill", connector="mooncake", **facts))
        self.d = self.add(SimFacts(role="decode", connector="mooncake", **facts))

    def prefill(
        self, prompt: tuple[int, ...] = PROMPT, transfer_id: str = "xfer-1", **more: Any
    ) -> Run:
        """Start P's leg."""
        return self.ask(self.p, prompt, 1, to_prefill(transfer_id), **more)

    def decode(
        self, prompt: tuple[int, ...] = PROMPT, transfer_id: str = "xfer-1", **more: Any
    ) -> Run:
        """Start D's leg."""
        return self.ask(self.d, prompt, 8, to_decode(transfer_id), **more)

    def later(self, seconds: float = 1.0) -> None:
        self.run(self.now + seconds)

    @property
    def external(self) -> int:
        return self.d.stats.prompt_tokens_by_source["external_kv_transfer"]

    @property
    def used(self) -> tuple[float, float]:
        """Shares of KV blocks in use."""
        return self.p.core.pool.usage, self.d.core.pool.usage

    def held(self, engine: VirtualEngine | None = None) -> list[str]:
        """Transfers whose blocks P keeps."""
        return list((engine or self.p).core.connector.leases(self.now))


def mooncake(engine: VirtualEngine) -> Mooncake:
    assert isinstance(engine.core.connector, Mooncake)
    return engine.core.connector


# -- how it goes well


@given(
    st.integers(1, 70),
    st.sampled_from([1, 5, 16, 32]),
    st.sampled_from(["both", "prefill", "decode"]),
)
@settings(max_examples=60, deadline=None)
def test_a_pair_says_what_one_engine_says_in_whatever_order_it_is_asked(length, block_size, first):
    prompt = tuple(range(300, 300 + length))
    pair = Pair(block_size=block_size, max_model_len=500)
    if first == "decode":
        run = pair.decode(prompt)
        pair.later()
        pair.prefill(prompt)
    else:
        pair.prefill(prompt)
        if first == "prefill":
            pair.later()
        run = pair.decode(prompt)
    pair.later()
    assert run.tokens == plain(prompt)
    assert pair.external == length
    assert pair.used == (0, 0)
    assert not pair.held()


def test_prefill_answers_nothing_and_keeps_the_blocks():
    pair = Pair()
    run = pair.prefill()
    pair.later()
    assert (run.over, run.outputs[-1].kv_transfer_params) == ("length", None)
    assert pair.held() == ["xfer-1"]
    assert pair.used[0] > 0


def test_what_decode_has_cached_is_not_sent_again():
    pair = Pair()
    pair.answer(pair.d)
    pair.prefill()
    run = pair.decode()
    pair.later()
    assert run.tokens == plain()
    assert pair.external == 4
    assert pair.used == (0, 0)


# -- prefill keeps blocks only when it ends by length


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_without_an_end_by_length_no_kv_is_sent_and_decode_waits_until_prefill_gives_up(end):
    pair = Pair()
    if end == "stop":
        token = pair.answer(pair.p, PROMPT, 1).tokens[0]
    run = pair.decode()
    pair.later()
    if end == "stop":
        pair.prefill(stop_token_ids=frozenset([token]))
    else:
        pair.prefill(id="p")
        pair.abort(pair.p, "p")
    pair.later()
    assert not pair.held()
    assert pair.used[0] == 0
    assert run.outputs == []
    pair.run(LEASE - 1)
    assert run.outputs == []
    pair.run(LEASE + 3)
    assert run.over == "error"
    assert pair.used == (0, 0)
    assert pair.d.stats.failed_receives == 1


def test_prefill_again_with_the_same_id_does_not_help_who_waits_for_an_aborted_one():
    pair = Pair()
    run = pair.decode()
    pair.later()
    pair.prefill(id="p")
    pair.abort(pair.p, "p")
    pair.prefill()
    pair.later()
    assert run.outputs == []
    assert pair.held() == ["xfer-1"]


def test_prefill_again_with_the_same_id_helps_if_prefill_has_never_had_it():
    pair = Pair()
    run = pair.decode()
    pair.later(100)
    assert run.outputs == []
    pair.prefill()
    pair.later()
    assert run.tokens == plain()


def test_without_a_transfer_id_nothing_is_kept():
    pair = Pair()
    run = pair.ask(pair.p, PROMPT, 1, {"do_remote_decode": True})
    pair.later()
    assert run.over == "length"
    assert pair.used[0] == 0


def test_a_lease_ends():
    pair = Pair()
    pair.prefill()
    pair.run(LEASE - 1)
    assert pair.used[0] > 0
    pair.run(LEASE + 1)
    assert pair.used[0] == 0
    assert pair.p.stats.kv_expired == 1


def test_two_prompts_with_one_transfer_id_get_each_others_kv():
    pair = Pair()
    pair.prefill(OTHER)
    run = pair.decode()
    pair.later()
    assert run.over == "length"
    assert run.tokens != plain()


def test_a_longer_prompt_than_prefills_fails_and_prefill_keeps_its_blocks():
    pair = Pair()
    pair.prefill(PROMPT[:40])
    run = pair.decode()
    pair.later()
    assert run.over == "error"
    assert pair.held() == ["xfer-1"]
    pair.decode(PROMPT[:40])
    pair.later()
    assert pair.used == (0, 0)


def test_with_recompute_a_failed_load_is_computed():
    pair = Pair(kv_load_failure_policy="recompute")
    pair.prefill(PROMPT[:40])
    run = pair.decode()
    pair.later()
    assert run.tokens == plain()


# -- decode


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_bootstrap_addr", "transfer_id"])
def test_without_a_key_the_request_waits_for_ever_and_its_blocks_are_lost(key):
    pair = Pair()
    pair.prefill()
    params = {name: value for name, value in to_decode().items() if name != key}
    run = pair.ask(pair.d, PROMPT, 8, params, id="d")
    pair.run(2 * LEASE)
    assert run.outputs == []
    pair.abort(pair.d, "d")
    pair.later()
    assert not pair.d.dead
    assert pair.used[1] > 0


def test_an_engine_id_that_the_bootstrap_server_does_not_name_fails_at_once():
    pair = Pair()
    pair.prefill()
    run = pair.ask(pair.d, PROMPT, 8, to_decode(engine_id="engine-7"))
    pair.later()
    assert run.over == "error"
    assert pair.held() == ["xfer-1"]


def test_a_dead_prefill_is_noticed_a_minute_after_it_would_have_given_up():
    pair = Pair()
    pair.prefill()
    pair.decode()
    pair.later()
    pair.p.dead = True  # its worker's address is known
    run = pair.decode(OTHER)
    asked = pair.now
    pair.run(asked + LEASE + 59)
    assert run.outputs == []
    pair.run(asked + LEASE + 62)
    assert run.over == "error"


def test_an_abort_before_it_is_scheduled_frees_prefills_blocks():
    pair = Pair(max_num_seqs=1)
    pair.ask(pair.d, OTHER, 500, id="first", ignore_eos=True)
    pair.prefill()
    pair.later(0.1)
    pair.decode(id="d")
    pair.abort(pair.d, "d")
    pair.later(0.1)
    assert not pair.held()
    assert pair.used[0] == 0


def test_an_abort_while_it_waits_keeps_its_blocks_until_prefill_has_sent():
    pair = Pair()
    pair.decode(id="d")
    pair.later()
    pair.abort(pair.d, "d")
    pair.later()
    assert pair.used[1] > 0
    pair.prefill()
    pair.later()
    assert pair.used == (0, 0)


def test_a_refused_request_frees_prefills_blocks():
    pair = Pair()
    pair.prefill()
    pair.later()
    pair.d.core.reject(to_decode())
    pair._turn(pair.d)
    pair.later()
    assert not pair.held()
    assert pair.used[0] == 0


def test_a_request_refused_before_prefill_has_finished_frees_its_blocks_when_it_has():
    pair = Pair()
    pair.d.core.reject(to_decode())
    pair._turn(pair.d)
    pair.later()
    assert mooncake(pair.p).waiting == 1
    run = pair.prefill()
    pair.later()
    assert run.over == "length"
    assert not pair.held()
    assert pair.used[0] == 0


def test_a_refused_request_without_a_transfer_id_does_nothing():
    pair = Pair()
    pair.d.core.reject({"do_remote_prefill": True})
    assert not pair.d.core.commands


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_bootstrap_addr"])
def test_a_refused_request_that_does_not_say_where_prefill_is_kills_the_core(key):
    pair = Pair()
    params = {name: value for name, value in to_decode().items() if name != key}
    with pytest.raises(EngineDeadError):
        pair.d.core.reject(params)


# -- how much prefill handles at once


def few(**facts: Any) -> Pair:
    return Pair(mooncake=MooncakeFacts(num_workers=1), **facts)


def test_questions_that_wait_for_their_prompts_keep_others_waiting():
    pair = few()
    lost = [pair.decode(OTHER, f"never-{number}") for number in range(2)]
    pair.prefill()
    run = pair.decode()
    pair.run(LEASE - 1)
    assert run.outputs == []
    assert pair.held() == ["xfer-1"], "it is there all the time"
    pair.run(LEASE + 2)
    assert [one.over for one in lost] == ["error", "error"]
    # Its own lease has ended as well by then, so it waits once more.
    assert not pair.held()


def test_questions_are_handled_one_after_the_other_when_their_prompts_come():
    pair = few()
    runs = [pair.decode(transfer_id=f"xfer-{number}") for number in range(7)]
    pair.later()
    assert mooncake(pair.p).waiting == 7
    for number in range(7):
        pair.prefill(transfer_id=f"xfer-{number}")
    pair.later()
    assert [run.tokens for run in runs] == [plain()] * 7
    assert pair.used == (0, 0)


# -- roles


def test_a_producer_that_is_to_decode_dies():
    pair = Pair()
    pair.ask(pair.p, PROMPT, 8, to_decode())
    pair.later()
    assert pair.p.dead


def test_a_consumer_that_is_to_prefill_dies():
    pair = Pair()
    pair.ask(pair.d, PROMPT, 1, to_prefill())
    pair.later()
    assert pair.d.dead


def test_a_producer_that_refuses_a_decode_request_dies():
    with pytest.raises(EngineDeadError):
        Pair().p.core.reject(to_decode())


def test_an_engine_of_both_roles_takes_both():
    engines = Engines()
    both = [engines.add(SimFacts(connector="mooncake", kv_role="kv_both")) for _ in range(2)]
    engines.ask(both[1], PROMPT, 1, to_prefill())
    run = engines.ask(both[0], PROMPT, 8, to_decode(engine_id="engine-1", bootstrap="2"))
    engines.run(1)
    assert run.tokens == plain()


# -- for an operator


def test_ending_all_leases_ends_those_who_wait_too():
    pair = Pair()
    pair.prefill()
    run = pair.decode(OTHER, "xfer-2")
    pair.later()
    assert pair.p.core.connector.end_leases(pair.now) == 1
    pair.later()
    assert run.over == "error"
    assert pair.used == (0, 0)
