"""How long pulls stop streams: from the times of tokens to three terms, with two modes, late tokens
and disturbances.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import Gaps, LegTimes, RequestEnded
from pdproxy_lab.calibrate import stand_in_front
from pdproxy_lab.calibrate.stalls import TERMS, StallRow, fitted_stalls, stall_row
from pdproxy_lab.calibrate.stand_in_front import splitting
from pdproxy_lab.calibrate.trials import Seen, Trial, TrialError, TrialPrompt
from pdproxy_lab.conformance.tap import Tap

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "kv-pulls-h200.json"
STEP = 0.005
FREE = Hardware(decode_step_s=STEP, decode_step_per_seq_s=0.0)
"""Sequences that cost a step nothing."""


def stream(
    count: int, *stalls: tuple[int, float], late: tuple[int, float] | None = None
) -> tuple[float, ...]:
    """Return the times of a stream's tokens. `stalls`: before which token for how long; `late`: one
    that is seen late.
    """
    times, now = [], 0.0
    for place in range(count):
        now += STEP + sum(seconds for at, seconds in stalls if at == place)
        times.append(now)
    if late is not None:
        place, seconds = late
        times[place] += seconds
        times = [max(times[: at + 1]) for at in range(count)]
    return tuple(times)


def row(
    times: tuple[float, ...], first: int, last: int, pulls: int = 1, hardware: Hardware = FREE
) -> StallRow | None:
    """Return what a stream shows of pulls that are asked for after token `first` and answered after
    token `last`.
    """
    prompt = TrialPrompt(times[first] + 0.001, times[last] + 0.001)
    return stall_row(
        Trial("pulls", 1, 32, len(times), (1000,) * pulls),
        Seen((times,), (prompt,) * pulls),
        hardware,
    )


def test_a_stall_is_how_much_later_the_tokens_come() -> None:
    found = row(stream(60, (20, 0.02)), 10, 30)
    assert found is not None
    assert (found.pulls, found.steps, found.tokens) == (1, 1, 1000)
    assert found.seconds == pytest.approx(0.02)


def test_stalls_of_several_steps_are_counted_and_added_up() -> None:
    found = row(stream(60, (14, 0.02), (20, 0.03)), 10, 30, pulls=4)
    assert found is not None
    assert (found.pulls, found.steps, found.tokens) == (4, 2, 4000)
    assert found.seconds == pytest.approx(0.05)
    # There are no more steps than pulls, whatever else is slow.
    many = row(stream(60, (14, 0.02), (20, 0.03)), 10, 30, pulls=1)
    assert many is not None
    assert many.steps == 1


def test_stalls_before_the_first_pull_do_not_count() -> None:
    times = stream(60, (9, 0.5), (20, 0.02))
    asked = TrialPrompt(times[10] + 0.001, times[30] + 0.001)
    seen = Seen((times,), (asked,), prefilled=times[16] + 0.001)
    found = stall_row(Trial("a pull", 1, 32, 60, (1000,)), seen, FREE)
    assert found is not None
    assert found.seconds == pytest.approx(0.02)


@pytest.mark.parametrize("place", [8, 12, 20, 29, 31, 40])
def test_a_token_that_the_client_sees_late_is_no_stall(place: int) -> None:
    found = row(stream(60, late=(place, 0.013)), 10, 30, pulls=4)
    assert found is not None
    assert found.seconds == pytest.approx(0.0, abs=1e-9)


def test_what_the_pulled_sequences_take_of_the_steps_is_no_stall() -> None:
    hardware = structs.replace(FREE, decode_step_per_seq_s=0.001, context_token_s=1e-7)
    found = row(stream(60, (20, 0.02 + 0.001 + 0.0001)), 10, 30, hardware=hardware)
    assert found is not None
    # but for the streams' own growing context
    assert found.seconds == pytest.approx(0.02, abs=0.0001)


def test_streams_that_end_before_the_pulls_or_begin_with_them_show_nothing() -> None:
    times = stream(60)
    assert row(times, 10, 57) is None
    assert row(times, 1, 30) is None
    assert row((0.1,) * 60, 10, 30) is None
    assert row(times, 10, 55) is not None


def rows_of(pull: float, further: float, per_token: float) -> list[StallRow]:
    found = []
    for pulls, steps in ((1, 1), (4, 1), (4, 2)):
        for tokens in (256, 1000, 4000):
            seconds = steps * pull + (pulls - steps) * further + pulls * tokens * per_token
            found += [StallRow(pulls, steps, pulls * tokens, seconds)] * 4
    return found


@pytest.mark.parametrize(
    "terms", [(0.01, 0.016, 0.0), (0.0, 0.0, 5e-6), (0.002, 0.004, 3e-6), (0.0, 0.003, 0.0)]
)
def test_the_terms_come_back(terms: tuple[float, float, float]) -> None:
    found, assumed = fitted_stalls(rows_of(*terms), STEP)
    assert {name: found[name].value if name in found else 0.0 for name in TERMS} == pytest.approx(
        dict(zip(TERMS, terms, strict=True)), rel=1e-6, abs=1e-12
    )
    assert [line.split()[0] for line in assumed] == [
        name for name, one in zip(TERMS, terms, strict=True) if not one
    ]


def test_stalls_with_two_modes_count_with_their_mean() -> None:
    """As measured: three of 16 pulls of 4,000 tokens stop the streams for 3 ms, the others for
    22.
    """
    rows = []
    for tokens, merged, scattered in (
        (256, 0.0003, 0.0014),
        (1000, 0.0008, 0.0055),
        (4000, 0.003, 0.022),
    ):
        rows += [StallRow(1, 1, tokens, merged)] * 3 + [StallRow(1, 1, tokens, scattered)] * 13
    found, _ = fitted_stalls(rows, 0.0045)
    assert found["pull_token_s"].value * 4000 == pytest.approx(
        (3 * 0.003 + 13 * 0.022) / 16, rel=0.05
    )
    assert found["pull_token_s"].low < found["pull_token_s"].value < found["pull_token_s"].high


def test_the_stalls_of_an_h200_grow_with_the_tokens() -> None:
    """Those of docs/evidence: long ones within a quarter, short ones within a step or so."""
    (run,) = [one for one in json.loads(EVIDENCE.read_text())["runs"] if one["run"] == "default"]
    rows = [
        StallRow(
            one["n"],
            len(one["steps_with_pulls"]),
            one["n"] * one["tokens"],
            one["all_gaps_excess_ms"] / 1e3,
        )
        for one in run["trials"]
        if one["kind"] == "pull"
    ]
    found, _ = fitted_stalls(rows, 0.0046)
    assert list(found) == ["pull_token_s"]
    assert found["pull_token_s"].value == pytest.approx(5.2e-6, rel=0.01)
    for tokens in {row.tokens for row in rows}:
        mean = fmean(row.seconds for row in rows if row.tokens == tokens)
        near = 0.25 * mean if mean > 0.01 else 0.006
        assert found["pull_token_s"].value * tokens == pytest.approx(mean, abs=near), tokens


def test_one_disturbance_moves_little() -> None:
    rows = rows_of(0.0, 0.0, 5e-6)
    usual, _ = fitted_stalls(rows, STEP)
    disturbed, _ = fitted_stalls([*rows, StallRow(1, 1, 4000, 3.0)], STEP)
    assert disturbed["pull_token_s"].value == pytest.approx(usual["pull_token_s"].value, rel=0.25)


def test_noise_around_nothing_is_nothing() -> None:
    for seed in range(5):
        chance = random.Random(seed)
        rows = [replace(one, seconds=chance.gauss(0.0, 0.001)) for one in rows_of(0.0, 0.0, 0.0)]
        found, assumed = fitted_stalls(rows, 0.06)
        stall = sum(
            found[name].value * one
            for name, one in zip(TERMS, (1, 3, 16_000), strict=True)
            if name in found
        )
        assert stall < 0.002
        assert len(found) + len(assumed) == len(TERMS)


def test_what_could_not_be_told_is_named() -> None:
    assert fitted_stalls([], STEP) == (
        {},
        [f"{name} is 0: not measured, the streams ended before the pulls" for name in TERMS],
    )
    few = "not measured, only 3 trials of pulls beside streams could be timed"
    assert fitted_stalls([StallRow(1, 1, 256, 0.01)] * 3, STEP) == (
        {},
        [f"{name} is 0: {few}" for name in TERMS],
    )
    found, assumed = fitted_stalls([StallRow(1, 1, 256, 0.01)] * 4, STEP)
    assert list(found) == ["pull_s"]
    assert assumed == [
        "further_pull_s is 0: not measured, no two pulls began in one step",
        "pull_token_s is 0: not measured, all pulls had the same size",
    ]
    found, assumed = fitted_stalls(rows_of(0.0, 0.0, 5e-6), STEP)
    assert assumed == [
        f"{name} is 0: the stalls show no effect of it" for name in ("pull_s", "further_pull_s")
    ]


# -- when prompts were prefilled


def ended(prefill_s: float | None, why_alone: str | None = None) -> RequestEnded:
    leg = LegTimes(prefill="p", decode="d", prefill_s=prefill_s, why_alone=why_alone)
    return RequestEnded(
        "r", "/v1/completions", "m", "ok", 200, (leg,), 0.0, 0.1, 0.2, 10, 1, Gaps()
    )


def through(*events: RequestEnded, beside: int = 2) -> Seen:
    """Return what the runner for a pair makes of a trial in which the proxy noted these events."""
    tap, seen = Tap(), Seen((), tuple(TrialPrompt(1.0 + place, 9.0) for place in range(beside)))
    tap.notify(ended(0.001))  # of the warm-up of the proxy

    async def run(_: Trial) -> Seen:
        tap.log.clear()
        for event in events:
            tap.notify(event)
        return seen

    async def carried_out() -> Seen:
        running: Any = SimpleNamespace(tap=tap)
        return await splitting(running, run)(Trial("a", beside=(10,) * beside))

    return asyncio.run(carried_out())


def test_the_proxy_knows_when_the_first_prompt_was_prefilled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stand_in_front, "_ENDS", 0.01)
    assert through(ended(0.3), ended(0.2)).prefilled == pytest.approx(1.2)
    # an earlier attempt
    assert through(ended(0.05), ended(0.3), ended(0.2)).prefilled == pytest.approx(1.2)
    assert through(ended(0.3), ended(None)).prefilled is None
    assert through(ended(0.3)).prefilled is None
    with pytest.raises(TrialError, match="served by one engine alone: short"):
        through(ended(0.3), ended(0.2, "short"))
