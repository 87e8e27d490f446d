"""Virtual engines with known times: the terms come back, with noise too, and what does not show is
not made up.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy.engine_model.profile import load
from pdproxy_lab.calibrate.experiments import ExperimentLimits, Experiments, Measured
from pdproxy_lab.calibrate.fitting import CantTellError, Fitted, fitted
from pdproxy_lab.calibrate.misfit import Misfit, misfits
from pdproxy_lab.calibrate.report import text_of
from pdproxy_lab.calibrate.rows import AloneRow, ChunkRow, DecodeRow, chunk_row
from pdproxy_lab.calibrate.run import Calibration
from pdproxy_lab.calibrate.trials import (
    MergedError,
    OutOfTimeError,
    Seen,
    Trial,
    TrialError,
    TrialPrompt,
)
from pdproxy_lab.calibrate.virtual import seen_of
from pdproxy_lab.sim.facts import SimFacts
from tests.calibrate.virtual import seen_once

H200 = load("h200-8b").hardware
SLOW = Hardware(
    prefill_tokens_per_s=900.0,
    chunk_base_s=0.02,
    decode_step_s=0.06,
    decode_step_per_seq_s=0.004,
    weights_read_once=True,
    context_token_s=2e-6,
    attention_s=4e-7,
    request_overhead_s=0.05,
)
SUM = Hardware(
    chunk_base_s=0.001, context_token_s=20e-9, attention_s=1e-9, request_overhead_s=0.004
)
TERMS = (
    "prefill_tokens_per_s",
    "chunk_base_s",
    "decode_step_s",
    "decode_step_per_seq_s",
    "context_token_s",
    "attention_s",
    "prompt_begin_s",
)


def options(hardware: Hardware, budget: int = 2048, length: int = 16384) -> dict[str, Any]:
    return {
        "hardware": hardware,
        "num_gpu_blocks": 31_000,
        "max_model_len": length,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": budget,
    }


def noisy(seen: Seen, chance: random.Random, jitter: float, prompts_late: float = 0.0) -> Seen:
    """Return it with each time up to `jitter` seconds late, in order; prompts `prompts_late`
    seconds more.
    """

    def late(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sorted(time + chance.uniform(0, jitter) for time in times))

    prompts = tuple(
        TrialPrompt(one.sent, one.answered + prompts_late + chance.uniform(0, jitter))
        for one in seen.beside
    )
    return Seen(tuple(late(times) for times in seen.streams), prompts)


def measured(
    one: dict[str, Any],
    *,
    jitter: float = 0.0,
    prompts_late: float = 0.0,
    trials: int = 10_000,
    **limits: Any,
) -> Measured:
    chance, left = random.Random(5), [trials]

    async def run(trial: Trial) -> Seen:
        left[0] -= 1
        if left[0] < 0:
            raise OutOfTimeError("over")
        seen = seen_once(trial, one)
        return noisy(seen, chance, jitter, prompts_late)

    return asyncio.run(Experiments(run, ExperimentLimits(one["max_model_len"], **limits)).all())


def found_in(rows: Measured) -> Fitted:
    return fitted(rows.decodes, rows.chunks, rows.alone, rows.budget)


@pytest.mark.parametrize(
    ("hardware", "budget"),
    [
        *((H200, budget) for budget in (512, 2000, 2048, 8192)),
        *((SUM, budget) for budget in (2000, 8192)),
    ],
)
def test_the_terms_and_the_budget_come_back(hardware: Hardware, budget: int) -> None:
    rows = measured(options(hardware, budget))
    found = found_in(rows)
    assert rows.budget == budget
    assert rows.complete
    for name in TERMS:
        assert getattr(found.hardware, name) == pytest.approx(
            getattr(hardware, name), rel=0.03, abs=1e-13
        ), name
    overhead = hardware.request_overhead_s + hardware.response_overhead_s
    assert found.hardware.request_overhead_s == pytest.approx(overhead, rel=0.03)
    assert found.hardware.weights_read_once == hardware.weights_read_once


def test_the_terms_come_back_from_times_that_are_late_by_up_to_a_quarter_of_a_step() -> None:
    one = options(H200)
    found = found_in(measured(one, jitter=0.001))
    for name in (
        "prefill_tokens_per_s",
        "decode_step_s",
        "decode_step_per_seq_s",
        "context_token_s",
    ):
        assert getattr(found.hardware, name) == pytest.approx(getattr(H200, name), rel=0.1), name
    overhead = H200.request_overhead_s + H200.response_overhead_s
    assert found.hardware.request_overhead_s == pytest.approx(overhead, rel=0.1)
    for name, one_spread in found.spreads.items():
        assert one_spread.low <= getattr(found.hardware, name) * 1.0001, name
        assert one_spread.high >= getattr(found.hardware, name) * 0.9999, name


@pytest.mark.parametrize(("budget", "length"), [(8192, 16384), (2048, 4096), (4096, 8192)])
def test_a_budget_as_long_as_the_longest_prompt_but_one_is_found_though_prompts_are_answered_late(
    budget: int, length: int
) -> None:
    # Prompts of exactly the budget are cut, too, but their last step has one token: it looks like
    # any other.
    rows = measured(
        options(H200, budget, length), jitter=0.0005, prompts_late=0.6 * H200.decode_step_s
    )
    assert rows.budget == budget
    fit = found_in(rows).hardware
    assert fit.prefill_tokens_per_s == pytest.approx(H200.prefill_tokens_per_s, rel=0.1)


def test_a_budget_is_found_or_assumed_though_one_step_too_many_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 16,382 tokens are exactly two steps with a budget of 8,192, beside a stream; a disturbed
    # search finds no boundary.
    def seen_wrongly(trial: Trial, seen: Seen, known: int | None = None) -> ChunkRow | None:
        row = chunk_row(trial, seen, known)
        if row is None or known is not None or not 8000 < trial.beside[0] != 12_288:
            return row
        return ChunkRow(
            row.tokens,
            row.steps + (trial.beside[0] == 16_382),
            row.streams,
            row.context,
            row.seconds,
        )

    monkeypatch.setattr("pdproxy_lab.calibrate.experiments.chunk_row", seen_wrongly)
    assert measured(options(H200, 8192)).budget == 8192


def test_a_budget_that_was_not_found_is_assumed_within_its_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(trial: Trial, seen: Seen, known: int | None = None) -> ChunkRow | None:
        row = chunk_row(trial, seen, known)
        return (
            row
            if trial.beside[0] in (48, 96, 192, 384, 768, 1536, 3072, 6144, 12_288, 16_382)
            else None
        )

    monkeypatch.setattr("pdproxy_lab.calibrate.experiments.chunk_row", blind)
    rows = measured(options(H200, 700))
    assert rows.budget is None
    assert rows.budget_most is not None
    assert 700 <= rows.budget_most < 768
    assert rows.budget_note.endswith(
        f" to {rows.budget_most}: the steps of prompts can't be told apart"
    )


def test_a_given_budget_that_is_not_the_engines_is_noted() -> None:
    rows = measured(options(H200, 512), budget=4096)
    assert len(rows.notes) == 1
    assert rows.notes[0].startswith(
        "--max-num-batched-tokens 4096 does not seem to be the engine's: prompts of 16382 tokens"
    )
    assert not measured(options(H200, 2048), jitter=0.0005, budget=2048).notes


def test_streams_that_do_not_run_together_are_not_tried_again_and_noted() -> None:
    one = options(SLOW, 1024, 2048) | {"max_num_seqs": 8}
    rows = measured(one)
    assert any(
        note.startswith("16 streams of 32 tokens did not run together") for note in rows.notes
    )
    assert max(row.streams for row in rows.decodes) == 8
    assert not [trial for trial, _ in rows.trials if trial.streams > 16]


def test_a_very_slow_engine_gets_no_trial_that_takes_minutes() -> None:
    one = options(structs.replace(SLOW, prefill_tokens_per_s=40.0), 2048, 4096)
    longest = 0.0

    async def run(trial: Trial) -> Seen:
        nonlocal longest
        seen = seen_once(trial, one)
        ends = [times[-1] for times in seen.streams] + [prompt.answered for prompt in seen.beside]
        longest = max(longest, *ends)
        return seen

    asyncio.run(Experiments(run, ExperimentLimits(4096)).all())
    assert 5 < longest < 45


def test_a_slow_engine_with_short_prompts() -> None:
    rows = measured(options(SLOW, 1024, 2048))
    found = found_in(rows)
    assert rows.budget == 1024
    for name in TERMS:
        assert getattr(found.hardware, name) == pytest.approx(getattr(SLOW, name), rel=0.1), name


def test_an_engine_whose_budget_no_prompt_reaches() -> None:
    rows = measured(options(SLOW, 8192, 2048))
    assert rows.budget is None
    assert rows.budget_note == "no prompt of up to 2046 tokens was cut"
    assert found_in(rows).hardware.decode_step_s == pytest.approx(SLOW.decode_step_s, rel=0.03)


def test_trials_without_times_are_left_out_and_a_few_of_them_do_no_harm() -> None:
    """Tokens come together where the machine is busy. Where they always do, that is the error."""
    one, count = options(H200), [0]

    async def run(trial: Trial) -> Seen:
        count[0] += 1
        if trial.streams and count[0] % 9 == 1:
            raise MergedError("together")
        return seen_once(trial, one)

    rows = asyncio.run(Experiments(run, ExperimentLimits(16384)).all())
    assert rows.budget == 2048
    assert found_in(rows).hardware.prefill_tokens_per_s == pytest.approx(
        H200.prefill_tokens_per_s, rel=0.05
    )

    async def never(trial: Trial) -> Seen:
        raise MergedError("always together")

    with pytest.raises(MergedError, match="always"):
        asyncio.run(Experiments(never, ExperimentLimits(16384)).all())


def test_a_budget_that_is_given_counts_though_the_time_ends_before() -> None:
    rows = measured(options(H200), trials=40, budget=4096)
    assert not rows.complete
    assert (rows.budget, rows.budget_note) == (4096, "given")


def test_a_given_budget_is_not_searched() -> None:
    rows = measured(options(H200, 2048), budget=2048)
    assert (rows.budget, rows.budget_note) == (2048, "given")
    assert not [trial for trial, _ in rows.trials if trial.beside and trial.beside[0] == 2047]


def test_terms_without_effect_are_0_and_named() -> None:
    found = found_in(measured(options(Hardware()), jitter=0.0005))
    assert found.hardware.context_token_s == pytest.approx(0.0, abs=2e-9)
    assert found.hardware.attention_s == pytest.approx(0.0, abs=1e-10)
    unseen = [name for name in TERMS if name not in found.spreads]
    assert all(any(line.startswith(f"{name} is 0") for line in found.assumed) for name in unseen)


def test_limits_bound_the_trials() -> None:
    one = options(H200, 2048, 4096)
    rows = measured(one, kv_tokens=10_000, max_num_seqs=8)
    for trial, _ in rows.trials:
        assert trial.tokens <= 8000
        assert trial.streams + len(trial.beside) <= 8
        assert trial.prompt_tokens + trial.output_tokens <= 4096
    assert found_in(rows).hardware.decode_step_s == pytest.approx(H200.decode_step_s, rel=0.03)


def test_the_end_of_the_time_leaves_what_was_measured() -> None:
    rows = measured(options(H200), trials=40)
    assert not rows.complete
    assert rows.budget is None
    assert rows.budget_note == "the time ended before it was found"
    assert found_in(rows).hardware.decode_step_s == pytest.approx(H200.decode_step_s, rel=0.03)


def test_too_little_time_is_refused_not_filled_with_defaults() -> None:
    with pytest.raises(CantTellError, match="prompts of three lengths"):
        found_in(measured(options(H200), trials=12))
    with pytest.raises(CantTellError, match="two numbers of streams"):
        found_in(measured(options(H200), trials=3))


def test_times_that_say_nothing_are_refused() -> None:
    chance = random.Random(3)
    decodes = [DecodeRow(n, 40.0 * n, chance.uniform(0.001, 1.0)) for n in (1, 2, 4, 8) * 2]
    chunks = [ChunkRow(n, 1, 1, 50.0, chance.uniform(0.001, 1.0)) for n in (64, 128, 512) * 3]
    alone = [AloneRow(n, chance.uniform(0.001, 1.0)) for n in (64, 128, 512) * 3]
    with pytest.raises(CantTellError, match="can't be determined"):
        fitted(decodes, chunks, alone, None)


def test_a_profile_explains_its_own_measurements() -> None:
    one = options(H200)
    rows = measured(one, jitter=0.0005)
    found = found_in(rows)
    off = misfits(rows.trials, one | {"hardware": found.hardware})
    assert {kind.what for kind in off} == {"step", "TTFT", "the prompt's steps"}
    assert sorted(abs(kind.relative) for kind in off)[len(off) // 2] < 0.03
    worse = misfits(
        rows.trials,
        one | {"hardware": structs.replace(found.hardware, prefill_tokens_per_s=20_000.0)},
    )
    assert max(abs(kind.relative) for kind in worse) > 0.5


def test_an_engine_that_claims_any_number_of_blocks_costs_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def noting(**options: Any) -> SimFacts:
        made.append(int(options["num_gpu_blocks"]))
        return SimFacts(**options)

    monkeypatch.setattr("pdproxy_lab.calibrate.virtual.SimFacts", noting)
    trial, one = Trial("several", 8, 4096, 60, (12_288,)), options(H200)
    seen = seen_of(trial, one | {"num_gpu_blocks": 1 << 24})
    assert made[-1] < 10_000
    assert seen == seen_of(trial, one)


def test_few_short_prompts_with_much_noise_still_tell_the_time_per_token() -> None:
    hardware = Hardware(decode_step_s=0.008, prefill_tokens_per_s=5000.0)
    lengths = (48, 96, 192, 384, 510)
    for seed in (1, 2, 3):  # with seed 2, two terms too many leave the time per token open
        chance = random.Random(seed)
        chunks = [
            ChunkRow(n, 1, 1, 40.0, hardware.step_s(n, 1) * chance.uniform(1, 1.5)) for n in lengths
        ]
        alone = [AloneRow(n, hardware.step_s(n, 0) * chance.uniform(1, 1.5)) for n in lengths]
        decodes = [DecodeRow(n, 60.0 * n, hardware.step_s(0, n)) for n in (1, 2, 4) * 2]
        found = fitted(decodes, chunks, alone, 2048).hardware
        assert 3300 < found.prefill_tokens_per_s < 5000


def test_the_report_marks_what_the_profile_does_not_explain() -> None:
    def report(predicted: float) -> str:
        off = [Misfit("a prompt", "TTFT", 3, 1.0, predicted)]
        return text_of(Calibration(load("h200-8b"), {}, off, "given", trials=3, seconds=1.0))

    assert "+10.0 %\n" in report(1.1)
    assert "!" not in report(1.1)
    assert "-30.0 % !\n!: more than 20 % off." in report(0.7)


def test_a_trial_that_an_engine_can_not_serve_is_refused() -> None:
    with pytest.raises(TrialError, match="can't serve it"):
        seen_of(Trial("too long", beside=(17_000,)), options(H200))


def late(place: int, by: float, gap: float = 0.005) -> ChunkRow | None:
    """A row of a prompt of one step of 0.1 s, whose token comes `by` seconds after the stream's
    token `place`.
    """
    times = [0.0]
    for number in range(1, 30):
        times.append(times[-1] + (0.1 if number == place else gap))
    trial = Trial("a", 1, 32, 30, (1000,))
    return chunk_row(
        trial, Seen((tuple(times),), (TrialPrompt(times[place - 3], times[place] + by),)), 1
    )


@pytest.mark.parametrize("by", [-0.001, 0.0, 0.003, 0.008])
def test_the_seconds_of_a_prompt_hardly_depend_on_which_token_seems_to_be_its_last_one(
    by: float,
) -> None:
    row = late(12, by)
    assert row is not None
    assert row.seconds == pytest.approx(0.1)


def test_the_first_tokens_of_a_stream_may_come_late_and_at_once() -> None:
    times = (0.03, 0.03, 0.03, 0.03, 0.03, 0.03, 0.135, 0.14, 0.145, 0.15, 0.155, 0.16)
    row = chunk_row(Trial("a", 1, 32, 12, (1000,)), Seen((times,), (TrialPrompt(0.03, 0.1351),)), 1)
    assert row is not None
    assert row.seconds == pytest.approx(0.105)


def test_tokens_that_come_at_once_count_as_the_first_of_them() -> None:
    times = (0.0, 0.005, 0.01, 0.015, 0.02, 0.12, 0.1201, 0.1202, 0.14, 0.145, 0.15, 0.155)
    row = chunk_row(Trial("a", 1, 32, 12, (1000,)), Seen((times,), (TrialPrompt(0.016, 0.1203),)))
    assert row is not None
    assert row.steps == 1
    assert row.seconds == pytest.approx(0.1, rel=0.15)
