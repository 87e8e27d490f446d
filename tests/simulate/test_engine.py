"""One engine against schedules that were computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.shape import Fleet, Shape
from tests.simulate.loads import SIMPLE, cluster

PLAIN, PAIR = Fleet(aggregated=1), Fleet(prefill=1, decode=1)
SHAPE = Shape(max_num_batched_tokens=100, kv_tokens=16_000)


def served(
    fleet: Fleet, *calls: tuple[float, int, int], shape: Shape = SHAPE, hardware: Hardware = SIMPLE
) -> Cluster:
    """Serve calls of (due, prompt, answer)."""
    made = cluster(fleet, shape, hardware)
    made.run([Call(number, *call) for number, call in enumerate(calls)])
    return made


def times(made: Cluster, number: int = 0) -> list[float]:
    records = made.records
    return [
        round(value, 6)
        for value in (records.first[number], records.last[number], records.worst_gap[number])
    ]


ONE_PLACE = {"shape": Shape(max_num_batched_tokens=100, max_num_seqs=1)}
LITTLE_SPACE = {"shape": Shape(max_num_batched_tokens=1000, kv_tokens=640)}
SLOW_PULLS = {"hardware": structs.replace(SIMPLE, pull_s=0.25, pull_token_s=0.01)}
OVERHEADS = {
    "hardware": structs.replace(
        SIMPLE, request_overhead_s=0.5, handoff_overhead_s=0.25, response_overhead_s=0.125
    )
}


@pytest.mark.parametrize(
    ("fleet", "calls", "options", "expected"),
    [
        # A prompt in chunks of 100, 100 and 50; then a step for each of four more tokens.
        (PLAIN, [(1.0, 250, 5)], {}, [(1.25, 1.29, 0.01)]),
        # A prompt beside decoding delays the other's token. The first one's steps: 0.05, then 0.01
        # each until 0.08, one of 0.09 with 80 tokens of the other prompt, and 5 more.
        (PLAIN, [(0.0, 50, 10), (0.075, 80, 2)], {}, [(0.05, 0.22, 0.09), (0.17, 0.18, 0.01)]),
        # Decoding takes a part of the chunk: 99 of 100 tokens are left for the prompt, so it takes
        # two steps of 0.109 and 0.06, from 0.06 on.
        (PLAIN, [(0.0, 50, 10), (0.055, 149, 1)], {}, [None, (0.229, 0.229, 0.0)]),
        # Two prompts share a step.
        (PLAIN, [(0.0, 5, 1), (0.001, 40, 1), (0.002, 60, 1)], {}, [None, (0.105,), (0.105,)]),
        # Requests wait for a place.
        (PLAIN, [(0.0, 10, 3), (0.0, 10, 1)], ONE_PLACE, [(0.01, 0.03, 0.01), (0.04,)]),
        # A split request waits for its KV: 0.05 prefill, 0.001 and 50 x 0.001 transfer; then its
        # last token again and two more.
        (PAIR, [(0.0, 50, 3)], {}, [(0.05 + 0.051 + 0.01, 0.05 + 0.051 + 0.03, 0.01)]),
        # The KV stays on the prefill engine until it was pulled: the second prompt fits once the
        # first one's has moved, after 0.6 prefill and 0.601 transfer.
        (PAIR, [(0.0, 600, 1)] * 2, LITTLE_SPACE, [(1.201 + 0.01,), (1.201 + 0.6 + 0.601 + 0.01,)]),
        # Pulls take time for each of their tokens: the transfer begins when it has been posted,
        # 0.25 and 50 x 0.01 later.
        (
            PAIR,
            [(0.0, 50, 3)],
            SLOW_PULLS,
            [(0.05 + 0.75 + 0.051 + 0.01, 0.05 + 0.75 + 0.051 + 0.03, 0.01)],
        ),
        # An answer of one token has no gap.
        (PLAIN, [(0.0, 10, 1)], {}, [(0.01, 0.01, 0.0)]),
        # The API server takes its time.
        (PAIR, [(0.0, 50, 1)], OVERHEADS, [(0.5 + 0.05 + 0.25 + 0.051 + 0.01 + 0.125,)]),
    ],
)
def test_schedules(
    fleet: Fleet,
    calls: list[tuple[float, int, int]],
    options: dict[str, Any],
    expected: list[tuple[float, ...] | None],
) -> None:
    """First token, last token, worst gap of each call, as far as they are given."""
    made = served(fleet, *calls, **options)
    for number, wanted in enumerate(expected):
        if wanted is not None:
            assert times(made, number)[: len(wanted)] == [round(one, 6) for one in wanted]


def test_transfers_in_line_wait_for_each_other() -> None:
    together = served(PAIR, (0.0, 50, 1), (0.0, 50, 1))
    in_line = structs.replace(SIMPLE, transfers_in_line=True)
    waited = served(PAIR, (0.0, 50, 1), (0.0, 50, 1), hardware=in_line)
    assert (
        sorted(times(waited, n)[0] for n in (0, 1))[1]
        > sorted(times(together, n)[0] for n in (0, 1))[1]
    )


def test_a_prefix_is_computed_once() -> None:
    made = cluster(PLAIN, Shape(max_num_batched_tokens=2000, kv_tokens=16_000), SIMPLE)
    made.run(
        [
            Call(0, 0.0, 1100, 1, [1, 2]),
            Call(1, 5.0, 1124, 1, [1, 2]),
            Call(2, 9.0, 1100, 1, [1, 7]),
        ]
    )
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
    assert served(PLAIN, (0.0, 10, 1)).itl.total == 0
