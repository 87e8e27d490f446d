"""A pair of virtual engines with known transfers: they come back; and a simulated pair behind the proxy, over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from pdproxy.cli.main import main
from pdproxy.engine_model.hardware import Hardware
from pdproxy.engine_model.profile import load
from pdproxy.lab.calibrate.experiments import Limits
from pdproxy.lab.calibrate.fitting import CantTellError, Fitted
from pdproxy.lab.calibrate.pair import PairMeasured, PairRow, StallRow, measure, stall_row, with_pair
from pdproxy.lab.calibrate.trials import OutOfTimeError, Prompt, Seen, Trial
from pdproxy.lab.calibrate.virtual import seen_of
from pdproxy.sim.facts import Facts
from tests.bench.servers import engines

H200 = load("h200-8b").hardware
LIMITS = Limits(16_384, 400_000)


def measured(hardware: Hardware, trials: int = 1000) -> PairMeasured:
    options: dict[str, Any] = load("h200-8b").options() | {"hardware": hardware}
    left = [trials]

    async def through(trial: Trial) -> Seen:
        left[0] -= 1
        if left[0] < 0:
            raise OutOfTimeError("over")
        return seen_of(trial, options, split=True)

    async def alone(trial: Trial) -> Seen:
        return seen_of(trial, options)

    return asyncio.run(measure(through, alone, LIMITS, 1 / hardware.prefill_tokens_per_s))


def test_the_transfers_of_a_pair_come_back() -> None:
    found = with_pair(Fitted(H200), measured(H200), 131_072).hardware
    assert found.link_bytes_per_s == pytest.approx(H200.link_bytes_per_s, rel=0.05)
    assert found.pull_s == pytest.approx(H200.pull_s, rel=0.1)
    fixed = H200.handoff_overhead_s + H200.transfer_latency_s
    assert found.handoff_overhead_s + found.transfer_latency_s == pytest.approx(fixed, rel=0.1)
    assert found.kv_bytes_per_token == 131_072


def test_a_pair_whose_pulls_stall_nothing() -> None:
    hardware = structs.replace(H200, pull_s=0.0, further_pull_s=0.0)
    found = with_pair(Fitted(hardware), measured(hardware), None)
    assert found.hardware.pull_s == found.hardware.further_pull_s == 0
    assert {"pull_s is 0: no stall shows beside streams"} <= set(found.assumed)
    assert any(line.startswith("kv_bytes_per_token = 131072: not shown") for line in found.assumed)
    fixed = hardware.handoff_overhead_s + hardware.transfer_latency_s
    assert found.hardware.handoff_overhead_s == pytest.approx(fixed, rel=0.1)


def test_stalls_that_could_not_be_measured_are_not_called_none() -> None:
    rows = [PairRow(tokens, 0.05 + tokens * 5e-6, 0.03) for tokens in (256, 512, 4096)] * 3
    found = with_pair(Fitted(H200), PairMeasured(rows, [StallRow(4, 1, 0.01)]), 131_072)
    assert "pull_s is 0: not measured, the streams ended before the pulls" in found.assumed
    assert "further_pull_s is 0: no stall shows beside streams" in found.assumed


def test_no_trial_of_a_pair_has_more_requests_than_the_engine_takes() -> None:
    most = 0

    async def run(trial: Trial) -> Seen:
        nonlocal most
        most = max(most, trial.streams + len(trial.beside))
        return seen_of(trial, load("h200-8b").options(), split=True)

    asyncio.run(measure(run, run, Limits(2048, max_num_seqs=4), 1e-5))
    assert most == 3


def test_further_pulls_of_a_step_are_told_from_its_first_one() -> None:
    rows = [PairRow(tokens, 0.05 + tokens * 5e-6, 0.03) for tokens in (256, 512, 4096)] * 3
    stalls = [StallRow(1, 1, 0.01)] * 3 + [StallRow(4, 2, 0.02 + 2 * 0.016)] * 2 + [StallRow(4, 1, 0.01 + 3 * 0.016)]
    found = with_pair(Fitted(H200), PairMeasured(rows, stalls), 131_072).hardware
    assert found.pull_s == pytest.approx(0.01)
    assert found.further_pull_s == pytest.approx(0.016)


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(CantTellError, match="two lengths through the pair"):
        with_pair(Fitted(H200), measured(H200, trials=2), None)


def test_streams_that_end_before_the_prompts_show_no_stall() -> None:
    trial = Trial("a", 1, 32, 3, (64,))
    assert stall_row(trial, Seen(((0.0, 0.1, 0.2),), (Prompt(0.1, 0.3),))) is None
    found = stall_row(trial, Seen(((0.0, 0.1, 0.2, 0.9, 1.0),), (Prompt(0.15, 0.9),)))
    assert found is not None
    assert found.steps == 1
    assert found.seconds == pytest.approx(0.6)


@pytest.fixture
def any_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are taken on this machine, which may be busy. What is refused for its spread is tested in virtual time."""
    monkeypatch.setattr("pdproxy.lab.calibrate.fitting._MOST_SPREAD", 1e9)


@pytest.mark.usefixtures("any_spread")
def test_a_simulated_pair_behind_the_proxy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pair.json"
    hardware = Hardware(
        decode_step_s=0.01, prefill_tokens_per_s=4000.0, pull_s=0.2, link_bytes_per_s=5e8, kv_bytes_per_token=50_000
    )
    shape: dict[str, Any] = {"hardware": hardware, "eos_every": 0, "max_model_len": 600, "num_gpu_blocks": 600}
    with engines(Facts(role="prefill", **shape), Facts(role="decode", **shape)) as (p, d):
        line = ["calibrate", "--prefill", p.url, "--decode", d.url, "--connector", "nixl", "--out", str(out)]
        code = main([*line, "--max-num-seqs", "8", "--max-num-batched-tokens", "2048", "--max-seconds", "24"])
        pulls = d.engine.stats.transferred_bytes.counts
    shown = capsys.readouterr()
    assert (code, shown.err) == (0, "")
    assert sum(pulls) > 10
    profile = load(str(out))
    assert profile.hardware.kv_bytes_per_token == pytest.approx(50_000, rel=0.05)
    # A busy machine makes stalls longer, never shorter.
    assert profile.hardware.pull_s > 0.16
    assert "pull_s" in shown.out
    assert "with connector nixl" in profile.origin.measured


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["127.0.0.1:1", "--prefill", "127.0.0.1:2"], "give one of both"),
        (["--prefill", "127.0.0.1:2", "--decode", "127.0.0.1:3"], "are missing"),
        ([], "are missing"),
        (["--prefill", "127.0.0.1:2", "--decode", "127.0.0.1:3", "--connector", "x"], "connector"),
        (["--prefill", "127.0.0.1:2", "--decode", "127.0.0.1:3", "--connector", "auto"], "--connector: name it"),
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
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("See `pdproxy")]
    assert len(lines) == 1, lines
    assert says in lines[0]


@pytest.mark.usefixtures("any_spread")
def test_a_prefill_engine_that_is_not_there_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"
    hardware = Hardware(decode_step_s=0.008, prefill_tokens_per_s=3000.0)  # far above the noise of a busy machine
    facts = Facts(hardware=hardware, eos_every=0, max_model_len=512, num_gpu_blocks=600)
    with engines(structs.replace(facts, role="decode")) as (d,):
        line = ["calibrate", "--prefill", "127.0.0.1:1", "--decode", d.url, "--connector", "nixl", "--out", str(out)]
        assert main([*line, "--max-num-seqs", "4", "--max-num-batched-tokens", "2048", "--max-seconds", "15"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert not out.exists()
