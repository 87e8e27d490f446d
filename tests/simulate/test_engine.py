"""One engine against schedules that were computed by hand."""

from __future__ import annotations

import pytest
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.shape import Fleet, Shape
from tests.simulate.loads import SIMPLE, cluster

PLAIN, PAIR = Fleet(aggregated=1), Fleet(prefill=1, decode=1)
SHAPE = Shape(max_num_batched_tokens=100, kv_tokens=16_000)


def served(fleet: Fleet, *calls: tuple[float, int, int], shape: Shape = SHAPE, hardware: Hardware = SIMPLE) -> Cluster:
    """Serve calls of (due, prompt, answer)."""
    made = cluster(fleet, shape, hardware)
    made.run([Call(number, *call) for number, call in enumerate(calls)])
    return made


def times(made: Cluster, number: int = 0) -> list[float]:
    records = made.records
    return [round(value, 6) for value in (records.first[number], records.last[number], records.worst_gap[number])]


def test_a_prompt_in_chunks_and_then_a_step_per_token() -> None:
    # 250 tokens in chunks of 100, 100 and 50; then four more tokens
    assert times(served(PLAIN, (1.0, 250, 5))) == [1.25, 1.29, 0.01]


def test_a_prompt_beside_decoding_delays_the_others_token() -> None:
    made = served(PLAIN, (0.0, 50, 10), (0.075, 80, 2))
    # The first one's steps: 0.05, then 0.01 each until 0.08, one of 0.09 with 80 tokens of the other prompt, and 5 more.
    assert times(made, 0) == [0.05, 0.22, 0.09]
    assert times(made, 1) == [0.17, 0.18, 0.01]


def test_decoding_takes_a_part_of_the_chunk() -> None:
    made = served(PLAIN, (0.0, 50, 10), (0.055, 149, 1))
    # 99 of 100 tokens are left for the prompt, so it takes two steps of 0.109 and 0.06, from 0.06 on
    assert times(made, 1) == [0.229, 0.229, 0.0]


def test_two_prompts_share_a_step() -> None:
    made = served(PLAIN, (0.0, 5, 1), (0.001, 40, 1), (0.002, 60, 1))
    assert times(made, 1)[0] == times(made, 2)[0] == 0.105


def test_requests_wait_for_a_place() -> None:
    made = served(PLAIN, (0.0, 10, 3), (0.0, 10, 1), shape=Shape(max_num_batched_tokens=100, max_num_seqs=1))
    assert times(made, 0) == [0.01, 0.03, 0.01]
    assert times(made, 1)[0] == 0.04


def test_a_split_request_waits_for_its_kv() -> None:
    made = served(PAIR, (0.0, 50, 3))
    # 0.05 prefill; 0.001 and 50 x 0.001 transfer; then its last token again and two more
    assert times(made) == [round(0.05 + 0.051 + 0.01, 6), round(0.05 + 0.051 + 0.03, 6), 0.01]


def test_the_kv_stays_on_the_prefill_engine_until_it_was_pulled() -> None:
    shape = Shape(max_num_batched_tokens=1000, kv_tokens=640)
    made = served(PAIR, (0.0, 600, 1), (0.0, 600, 1), shape=shape)
    # the second prompt fits once the first one's KV has moved: 0.6 prefill, 0.601 transfer
    assert times(made, 0)[0] == pytest.approx(1.201 + 0.01)
    assert times(made, 1)[0] == pytest.approx(1.201 + 0.6 + 0.601 + 0.01)


def test_pulls_take_time_for_each_of_their_tokens() -> None:
    hardware = structs.replace(SIMPLE, pull_s=0.25, pull_token_s=0.01)
    made = served(PAIR, (0.0, 50, 3), hardware=hardware)
    # as above, and the transfer begins when it has been posted: 0.25 and 50 x 0.01 later
    assert times(made) == [round(0.05 + 0.75 + 0.051 + 0.01, 6), round(0.05 + 0.75 + 0.051 + 0.03, 6), 0.01]


def test_transfers_in_line_wait_for_each_other() -> None:
    together = served(PAIR, (0.0, 50, 1), (0.0, 50, 1))
    in_line = Hardware(
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        decode_step_per_seq_s=0.0,
        link_bytes_per_s=131_072e3,
        transfers_in_line=True,
    )
    waited = served(PAIR, (0.0, 50, 1), (0.0, 50, 1), hardware=in_line)
    assert sorted(times(waited, n)[0] for n in (0, 1))[1] > sorted(times(together, n)[0] for n in (0, 1))[1]


def test_a_prefix_is_computed_once() -> None:
    made = cluster(PLAIN, Shape(max_num_batched_tokens=2000, kv_tokens=16_000), SIMPLE)
    made.run([Call(0, 0.0, 1100, 1, [1, 2]), Call(1, 5.0, 1124, 1, [1, 2]), Call(2, 9.0, 1100, 1, [1, 7])])
    assert [times(made, n)[0] for n in range(3)] == [1.1, 5.1, round(9.0 + (1100 - 512) / 1000, 6)]


def test_the_memory_forgets_what_was_used_longest_ago() -> None:
    made = cluster(PLAIN, Shape(max_num_batched_tokens=4000, kv_tokens=2048), SIMPLE)
    prompts = ([1], [2], [1], [3, 4, 5], [1], [2])
    calls = [Call(n, 10.0 * n, 512 * len(keys) + 1, 1, keys) for n, keys in enumerate(prompts)]
    made.run(calls)
    taken = [round(times(made, n)[0] - 10.0 * n, 3) for n in range(6)]
    # 1 is found the first time; then three new units leave room for neither 1 nor 2
    assert taken[2] < 0.05
    assert taken[5] == 0.513


def test_a_request_that_never_fits_is_refused() -> None:
    made = served(PLAIN, (0.0, 15_990, 20), (0.0, 10, 1))
    assert made.records.refusals == 1
    assert times(made, 1)[0] == 0.01


def test_an_answer_of_one_token_has_no_gap() -> None:
    made = served(PLAIN, (0.0, 10, 1))
    assert times(made) == [0.01, 0.01, 0.0]
    assert made.itl.total == 0


def test_the_api_server_takes_its_time() -> None:
    hardware = Hardware(
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        link_bytes_per_s=131_072e3,
        request_overhead_s=0.5,
        handoff_overhead_s=0.25,
        response_overhead_s=0.125,
    )
    made = served(PAIR, (0.0, 50, 1), hardware=hardware)
    assert times(made)[0] == pytest.approx(0.5 + 0.05 + 0.25 + 0.051 + 0.01 + 0.125)
