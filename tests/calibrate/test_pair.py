"""A pair of virtual engines with known transfers: they come back; and a simulated pair behind the
proxy, over HTTP.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from pdproxy.cli.main import main
from pdproxy.engine_model.hardware import Hardware
from pdproxy.engine_model.profile import load
from pdproxy_lab.calibrate.experiments import ExperimentLimits
from pdproxy_lab.calibrate.fitting import CantTellError, Fitted
from pdproxy_lab.calibrate.misfit import pair_misfits
from pdproxy_lab.calibrate.pair import PairMeasured, PairRow, measure, with_pair
from pdproxy_lab.calibrate.report import text_of
from pdproxy_lab.calibrate.run import Calibration
from pdproxy_lab.calibrate.stalls import StallRow
from pdproxy_lab.calibrate.trials import MergedError, OutOfTimeError, Seen, Trial, TrialPrompt
from pdproxy_lab.sim.facts import SimFacts
from tests.bench.servers import engines
from tests.calibrate.virtual import seen_once

H200 = load("h200-8b").hardware
LIMITS = ExperimentLimits(16_384, 400_000)
PULLS = {
    "per pull": (0.0098, 0.0163, 0.0),
    "per token": (0.0, 0.0, 5e-6),
    "both": (0.001, 0.004, 4e-6),
    "the first is the dearest": (0.02, 0.001, 1e-6),
}
FIELDS = ("pull_s", "further_pull_s", "pull_token_s")
TRIES = 3
"""How often simulated engines are measured in real time: on a busy machine the command may say that
what it has measured is not enough for one of the terms.
"""


def with_pulls(pull: float, further: float, per_token: float) -> Hardware:
    return structs.replace(H200, pull_s=pull, further_pull_s=further, pull_token_s=per_token)


def options_with(hardware: Hardware) -> dict[str, Any]:
    return load("h200-8b").options() | {"hardware": hardware}


def measured(
    hardware: Hardware, trials: int = 1000, change: Callable[[Seen], Seen] | None = None
) -> PairMeasured:
    """Carry out the trials on virtual engines. `change`: of the times of each one."""
    options, left = options_with(hardware), [trials]

    def seen(trial: Trial, split: bool) -> Seen:
        found = seen_once(trial, options, split=split)
        return found if change is None or not trial.streams else change(found)

    async def through(trial: Trial) -> Seen:
        left[0] -= 1
        if left[0] < 0:
            raise OutOfTimeError("over")
        return seen(trial, True)

    async def alone(trial: Trial) -> Seen:
        return seen(trial, False)

    return asyncio.run(measure(through, alone, LIMITS, hardware))


@pytest.mark.parametrize("terms", PULLS.values(), ids=PULLS)
def test_the_transfers_and_the_stalls_of_a_pair_come_back(
    terms: tuple[float, float, float],
) -> None:
    hardware = with_pulls(*terms)
    found = with_pair(Fitted(hardware), measured(hardware), 131_072).hardware
    assert found.link_bytes_per_s == pytest.approx(hardware.link_bytes_per_s, rel=0.05)
    for name in FIELDS:
        assert getattr(found, name) == pytest.approx(getattr(hardware, name), rel=0.03, abs=1e-8), (
            name
        )
    fixed = hardware.handoff_overhead_s + hardware.transfer_latency_s
    assert found.handoff_overhead_s + found.transfer_latency_s == pytest.approx(fixed, rel=0.1)
    assert found.kv_bytes_per_token == 131_072


def test_the_stalls_come_back_from_late_times_that_do_not_say_when_a_prompt_was_prefilled() -> None:
    hardware, chance = with_pulls(0.0, 0.002, 5e-6), random.Random(7)

    def late(seen: Seen) -> Seen:
        # Each token up to a quarter of a step late; one of all is later than the next ones.
        streams = []
        for times in seen.streams:
            moved = [time + chance.uniform(0, 0.001) for time in times]
            moved[chance.randrange(10, len(moved) - 10)] += 0.02
            streams.append(tuple(max(moved[: place + 1]) for place in range(len(moved))))
        return Seen(tuple(streams), seen.beside)

    found = with_pair(Fitted(hardware), measured(hardware, change=late), 131_072).hardware
    for pulls, tokens in ((1, 1000), (1, 4000), (4, 4000), (4, 16_000)):
        stall, expected = (
            one.step_s(0, 2, 0, 0.0, pulls, 0, tokens) - one.step_s(0, 2)
            for one in (found, hardware)
        )
        assert stall == pytest.approx(expected, rel=0.15, abs=0.001), (pulls, tokens)


def test_a_pair_whose_pulls_stall_nothing() -> None:
    hardware = with_pulls(0.0, 0.0, 0.0)
    found = with_pair(Fitted(hardware), measured(hardware), None)
    assert [getattr(found.hardware, name) for name in FIELDS] == [0, 0, 0]
    assert {f"{name} is 0: no stall shows beside streams" for name in FIELDS} <= set(found.assumed)
    assert any(line.startswith("kv_bytes_per_token = 131072: not shown") for line in found.assumed)
    fixed = hardware.handoff_overhead_s + hardware.transfer_latency_s
    assert found.hardware.handoff_overhead_s == pytest.approx(fixed, rel=0.1)


def test_stalls_that_could_not_be_measured_are_not_called_none() -> None:
    rows = [PairRow(tokens, 0.05 + tokens * 5e-6, 0.03) for tokens in (256, 512, 4096)] * 3
    found = with_pair(Fitted(H200), PairMeasured(rows), 131_072)
    assert {
        f"{name} is 0: not measured, the streams ended before the pulls" for name in FIELDS
    } <= set(found.assumed)
    found = with_pair(Fitted(H200), PairMeasured(rows, [StallRow(1, 1, 256, 0.01)] * 4), 131_072)
    assert found.hardware.pull_s == pytest.approx(0.01)
    assert "further_pull_s is 0: not measured, no two pulls began in one step" in found.assumed
    assert "pull_token_s is 0: not measured, all pulls had the same size" in found.assumed


def test_streams_that_end_before_the_pulls_are_longer_the_next_time() -> None:
    outputs: dict[str, list[int]] = {}
    options = options_with(H200)

    async def through(trial: Trial) -> Seen:
        seen = seen_once(trial, options, split=True)
        if trial.streams:
            outputs.setdefault(trial.name, []).append(trial.output_tokens)
            if len(outputs[trial.name]) < 3:
                end = seen.streams[0][-1]
                seen = Seen(
                    seen.streams, tuple(TrialPrompt(one.sent, end + 1.0) for one in seen.beside)
                )
            elif len(outputs[trial.name]) == 3:
                raise MergedError("together")
        return seen

    async def alone(trial: Trial) -> Seen:
        return seen_once(trial, options)

    found = asyncio.run(measure(through, alone, ExperimentLimits(600), H200))
    # One of several has a bound: the longest request that the engine takes.
    for lengths in outputs.values():
        assert lengths[0] < lengths[1] < lengths[2] == lengths[3]
        assert max(lengths) <= 600 - 32
    # Two trials were too short and one had no times: five are left of each kind.
    assert len(found.stalls) == 5 * len(outputs) > 0


def test_the_report_shows_the_trials_through_the_pair() -> None:
    hardware = with_pulls(0.001, 0.004, 4e-6)
    rows = measured(hardware)
    found = with_pair(Fitted(hardware), rows, 131_072)
    off = pair_misfits(rows.seen, options_with(found.hardware))
    assert {one.what for one in off} == {"TTFT", "a step and the stalls"}
    assert max(abs(one.relative) for one in off) < 0.02
    names = [one.name for one in off]
    assert "a prompt of 8192 tokens through the pair" in names
    assert "4 pulls of 4096 tokens beside streams" in names
    assert not any("warm-up" in name for name in names)
    without = pair_misfits(rows.seen, options_with(with_pulls(0.001, 0.004, 0.0)))
    assert min(one.relative for one in without) < -0.5
    report = text_of(
        Calibration(load("h200-8b"), found.spreads, off, "given", trials=3, seconds=1.0)
    )
    assert re.search(r"^pull_token_s +4 µs +4 to 4$", report, re.MULTILINE)
    assert re.search(
        r"^a pull of 256 tokens beside streams +a step and the stalls +8 +6\.42 ms \(6\.42 to "
        r"6\.42\) +6\.42 ms",
        report,
        re.MULTILINE,
    )


def test_no_trial_of_a_pair_has_more_requests_than_the_engine_takes() -> None:
    most = 0

    async def run(trial: Trial) -> Seen:
        nonlocal most
        most = max(most, trial.streams + len(trial.beside))
        return seen_once(trial, load("h200-8b").options(), split=True)

    # Where it takes no more than the streams, nothing is pulled beside them.
    for takes, expected in ((8, 6), (4, 4), (3, 3), (2, 1)):
        most = 0
        asyncio.run(measure(run, run, ExperimentLimits(2048, max_num_seqs=takes), H200))
        assert most == expected
    most = 0
    asyncio.run(measure(run, run, ExperimentLimits(2048, kv_tokens=2500), H200))
    assert most == 6  # of small prompts


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(CantTellError, match="two lengths through the pair"):
        with_pair(Fitted(H200), measured(H200, trials=2), None)


@pytest.fixture
def any_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are taken on this machine, which may be busy. What is refused for its spread is tested
    in virtual time.
    """
    monkeypatch.setattr("pdproxy_lab.calibrate.fitting._MOST_SPREAD", 1e9)


@pytest.mark.usefixtures("any_spread")
def test_a_simulated_pair_behind_the_proxy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pair.json"
    hardware = Hardware(
        decode_step_s=0.01,
        prefill_tokens_per_s=4000.0,
        pull_s=0.2,
        link_bytes_per_s=5e8,
        kv_bytes_per_token=50_000,
    )
    shape: dict[str, Any] = {
        "hardware": hardware,
        "eos_every": 0,
        "max_model_len": 600,
        "num_gpu_blocks": 600,
    }
    with engines(SimFacts(role="prefill", **shape), SimFacts(role="decode", **shape)) as (p, d):
        line = [
            "calibrate",
            "--prefill",
            p.url,
            "--decode",
            d.url,
            "--connector",
            "nixl",
            "--out",
            str(out),
        ]
        for _ in range(TRIES):
            code = main(
                [
                    *line,
                    "--max-num-seqs",
                    "8",
                    "--max-num-batched-tokens",
                    "2048",
                    "--max-seconds",
                    "40",
                ]
            )
            shown = capsys.readouterr()
            if "resampled" not in shown.err:
                break
        pulls = d.engine.stats.transferred_bytes.counts
    assert (code, shown.err) == (0, "")
    assert sum(pulls) > 10
    profile = load(str(out))
    assert profile.hardware.kv_bytes_per_token == pytest.approx(50_000, rel=0.05)
    # On a busy machine the token before a stall comes late, too, and so a part of the stall does
    # not show. Virtual time is exact.
    found = profile.hardware
    assert found.step_s(0, 2, pulls=1, pulled_tokens=256) - found.step_s(0, 2) > 0.06
    assert "pull_s" in shown.out
    assert "a prompt of 256 tokens through the pair  TTFT" in re.sub("  +", "  ", shown.out)
    assert "a pull of 256 tokens beside streams  a step and the stalls" in re.sub(
        "  +", "  ", shown.out
    )
    assert "with connector nixl" in profile.origin.measured


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["127.0.0.1:1", "--prefill", "127.0.0.1:2"], "give one of both"),
        (["--prefill", "127.0.0.1:2", "--decode", "127.0.0.1:3"], "are missing"),
        ([], "are missing"),
        (["--prefill", "127.0.0.1:2", "--decode", "127.0.0.1:3", "--connector", "x"], "connector"),
        (
            ["--prefill", "127.0.0.1:2", "--decode", "127.0.0.1:3", "--connector", "auto"],
            "--connector: name it",
        ),
        (
            ["--prefill", "127.0.0.1:2", "--decode", "127.0.0.1:3", "--connector", "moriio"],
            "must not serve prompts alone",
        ),
    ],
)
def test_wrong_pairs_exit_with_2_and_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *words, "--out", str(tmp_path / "x.json")]) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("See `pdproxy")
    ]
    assert len(lines) == 1, lines
    assert says in lines[0]


@pytest.mark.usefixtures("any_spread")
def test_a_prefill_engine_that_is_not_there_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.json"
    # far above the noise of a busy machine
    hardware = Hardware(decode_step_s=0.008, prefill_tokens_per_s=3000.0)
    facts = SimFacts(hardware=hardware, eos_every=0, max_model_len=512, num_gpu_blocks=600)
    with engines(structs.replace(facts, role="decode")) as (d,):
        line = [
            "calibrate",
            "--prefill",
            "127.0.0.1:1",
            "--decode",
            d.url,
            "--connector",
            "nixl",
            "--out",
            str(out),
        ]
        assert (
            main(
                [
                    *line,
                    "--max-num-seqs",
                    "4",
                    "--max-num-batched-tokens",
                    "2048",
                    "--max-seconds",
                    "15",
                ]
            )
            == 1
        )
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert not out.exists()
