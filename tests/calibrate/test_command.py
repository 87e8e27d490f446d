"""`pdproxy calibrate` as it is called: a simulated engine, hostile ones, busy ones, options, an
orderly end.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from pdproxy.engine_model.hardware import Hardware
from pdproxy.engine_model.profile import load
from pdproxy_lab.calibrate.http_runner import BusyError, HttpRunner, Target
from pdproxy_lab.calibrate.trials import OutOfTimeError, Trial
from pdproxy_lab.cli.calibrate import _name_of
from pdproxy_lab.sim.facts import SimFacts
from tests.bench.servers import FAST, engines
from tests.calibrate.servers import DONE, HEAD, MODELS, TOKEN, Answer, metrics, page, scripted
from tests.unit.test_progress import Terminal

URL = "127.0.0.1:1"


def run(url: str, out: Path, *more: str) -> int:
    return main(["calibrate", url, "--out", str(out), *more])


def test_a_simulated_engine_gets_a_profile_that_simulate_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Times are taken on this machine, which may be busy. What is refused for its spread is tested
    # in virtual time.
    monkeypatch.setattr("pdproxy_lab.calibrate.fitting._MOST_SPREAD", 1e9)
    out = tmp_path / "mine.json"
    facts = SimFacts(
        hardware=Hardware(
            decode_step_s=0.012, prefill_tokens_per_s=1000.0
        ),  # much longer than the stalls of a busy machine
        eos_every=0,
        max_model_len=512,
        num_gpu_blocks=600,
    )
    more = (
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "2048",
        "--accelerator",
        "a CPU",
        "--max-seconds",
        "12",
    )
    with engines(facts) as (engine,):
        code = run(engine.url, out, *more)
    shown = capsys.readouterr()
    assert (code, shown.err) == (0, "")
    profile = load(str(out))
    assert (profile.name, profile.origin.accelerator, profile.origin.model) == (
        "mine",
        "a CPU",
        "sim",
    )
    assert profile.origin.engine == "vLLM 0.32.0"
    # A busy machine makes steps longer, never shorter.
    assert profile.hardware.decode_step_s > 0.0115
    limits = profile.engine
    assert (limits.block_size, limits.num_gpu_blocks, limits.max_model_len) == (16, 600, 512)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (4, 2048)
    low, high = profile.origin.spread["decode_step_s"]
    assert low <= profile.hardware.decode_step_s <= high
    assert any("transfers" in line for line in profile.origin.assumed)
    assert not any(
        "max_num_seqs" in line or "max_num_batched_tokens" in line
        for line in profile.origin.assumed
    )
    assert "max_num_batched_tokens 2048: given" in shown.out
    assert "The profile against its own measurements:" in shown.out
    assert "4 streams of 32 tokens" in shown.out
    fitted = profile.fitted
    assert fitted is not None
    assert (fitted.sequences, fitted.answer_tokens) == ((0, 4), None)
    assert fitted.prompt_tokens is not None
    assert fitted.prompt_tokens[0] == 48
    assert fitted.prompt_tokens[1] > 300
    assert "\nfitted to prompts of 48 to " in shown.out
    assert (
        main(
            [
                "simulate",
                "--profile",
                str(out),
                "--aggregated",
                "1",
                "--rate",
                "2",
                "--requests",
                "5",
            ]
        )
        == 0
    )


HOSTILE: list[tuple[str, dict[str, Answer], str]] = [
    ("nothing there", {}, "status 404"),
    ("models are no JSON", {"models": page(b"<html>")}, "no list of models"),
    ("no models", {"models": page(b'{"data":[]}')}, "lists no model"),
    ("models without end", {"models": page(b" " * (9 << 20))}, "longer than"),
    ("closes at once", {"models": MODELS, "completions": b""}, "warm-up"),
    ("503", {"models": MODELS, "completions": page(b"b\x00sy\n", b"503 No")}, "status 503: b?sy"),
    ("dies in a stream", {"models": MODELS, "completions": HEAD + TOKEN * 8}, "without [DONE]"),
    ("too few tokens", {"models": MODELS, "completions": HEAD + TOKEN * 8 + DONE}, "events"),
    (
        "too many tokens",
        {"models": MODELS, "completions": HEAD + TOKEN * 99},
        "more than 13 events",
    ),
    ("no events", {"models": MODELS, "completions": page(b"{}")}, "content-type"),
    (
        "counts other tokens",
        {
            "models": MODELS,
            "completions": HEAD
            + TOKEN * 12
            + b'data: {"choices":[],"usage":{"prompt_tokens":99}}\n\n'
            + DONE,
        },
        "had 99 by the engine's count",
    ),
    (
        "ends an answer early",
        {
            "models": MODELS,
            "completions": HEAD
            + TOKEN * 8
            + b'data: {"choices":[],"usage":{"completion_tokens":8}}\n\n'
            + DONE,
        },
        "an answer of 12 tokens had 8 by the engine's count",
    ),
    (
        "busy",
        {"models": MODELS, "metrics": metrics(running=3)},
        "requests of others: 3 running and 0 waiting",
    ),
]


@pytest.mark.parametrize(
    ("answers", "says"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
def test_hostile_and_dying_engines_get_one_line_and_no_profile(
    answers: dict[str, Answer], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    with scripted(**answers) as url:
        assert run(url, out, "--max-seconds", "30") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("pdproxy calibrate: ")
    assert says in lines[0]
    assert lines[0].isprintable()
    assert not out.exists()


def test_a_terminal_shows_the_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with engines(FAST) as (engine,):
        assert run(engine.url, tmp_path / "mine.json", "--max-seconds", "1") == 1
    shown = terminal.getvalue()
    assert re.search(r"\r\x1b\[Ktrial 1, at most [01] seconds left: a prompt of ", shown), shown


def test_a_port_that_refuses_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted() as url:
        pass
    assert run(url, tmp_path / "x.json") == 1
    assert "/v1/models" in capsys.readouterr().err


def test_the_time_of_all_trials_is_bounded_though_an_engine_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(models=MODELS, completions=lambda: None) as url:
        assert run(url, tmp_path / "x.json", "--max-seconds", "0.3") == 1
        assert "two numbers of streams" in capsys.readouterr().err
        assert run(url, tmp_path / "x.json", "--timeout", "0.3") == 1
        assert "warm-up: no whole answer within 0.3 s" in capsys.readouterr().err


def test_an_interrupt_ends_it_and_keeps_an_old_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    out.write_text("old")
    with scripted(models=MODELS, completions=lambda: os.kill(os.getpid(), signal.SIGINT)) as url:
        assert run(url, out) == 130
    assert capsys.readouterr().err == "pdproxy calibrate: interrupted, nothing was written\n"
    assert out.read_text() == "old"


def runner(url: str, *, busy: bool = False, seconds: float = 30.0) -> HttpRunner:
    return HttpRunner(Target(url, {}, busy=busy), "salt", seconds)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (metrics(prompts=200), None),
        (metrics(prompts=5000), "others have sent 4800 prompt tokens meanwhile"),
        (metrics(prompts=200, cached=64), "64 prompt tokens were not computed: a cache had them"),
        (metrics(prompts=200, started=2), "the engine was restarted meanwhile"),
    ],
)
async def test_work_of_others_shows_in_the_metrics(after: bytes, says: str | None) -> None:
    # Two readings when it begins: what the engine says of itself, and whether it is idle.
    with scripted(models=MODELS, metrics=[metrics(), metrics(), after]) as url:
        one = runner(url)
        try:
            info = await one.info()
            one.prompt_tokens = 200
            assert await one.others() == says
        finally:
            await one.aclose()
    assert (info.model, info.max_model_len, info.block_size, info.num_gpu_blocks) == (
        "m",
        2048,
        16,
        500,
    )


async def test_work_of_others_at_a_pair_is_what_nobody_of_it_has_sent() -> None:
    pulled = metrics(prompts=200, cached=150, cache="external_kv_transfer")
    answers = [metrics(), metrics(), pulled]
    with scripted(models=MODELS, metrics=answers) as url:
        one = runner(url)
        try:
            await one.info()
            assert await one.others(200, pulls=True) is None
            assert await one.others(200) == "150 prompt tokens were not computed: a cache had them"
            assert (
                await one.others(100, pulls=True) == "others have sent 100 prompt tokens meanwhile"
            )
        finally:
            await one.aclose()


async def test_requests_that_come_between_trials_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdproxy_lab.calibrate.http_runner._IDLE", 0.05)
    with scripted(models=MODELS, metrics=[metrics(), metrics(), metrics(running=1)]) as url:
        one = runner(url)
        try:
            await one.info()
            with pytest.raises(BusyError, match="1 running"):
                await one(Trial("a", beside=(64,)))
        finally:
            await one.aclose()


async def test_busy_engines_are_measured_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(
        models=MODELS, metrics=metrics(running=1), completions=HEAD + TOKEN + DONE
    ) as url:
        one = runner(url, busy=True)
        try:
            await one.info()
            seen = await one(Trial("a", beside=(64,)))
        finally:
            await one.aclose()
    assert len(seen.beside) == 1
    assert seen.beside[0].ttft > 0
    assert one.prompt_tokens == 64


async def test_no_trial_begins_after_the_end_of_the_time() -> None:
    with scripted(models=MODELS) as url:
        one = runner(url, seconds=0.0)
        try:
            await one.info()
            assert not one.readable
            with pytest.raises(OutOfTimeError):
                await one(Trial("a", beside=(64,)))
        finally:
            await one.aclose()


@pytest.mark.parametrize(
    ("file", "name"), [("a\nb.json", "ab"), (" .json", "profile"), ("x" * 150 + ".json", "x" * 100)]
)
def test_a_file_with_an_odd_name_gives_the_profile_a_printable_one(file: str, name: str) -> None:
    assert _name_of(Path(file)) == name


WRONG: list[tuple[list[str], str]] = [
    ([URL], "--out"),
    (["--out", "x.json"], "URL"),
    (["ftp://x", "--out", "x.json"], "expected [NAME=]http://HOST:PORT"),
    ([URL, "--out", "/no/such/file"], "--out: file can't be written"),
    ([URL, "--out", "x.json", "--max-seconds", "0"], "--max-seconds: expected seconds above 0"),
    ([URL, "--out", "x.json", "--timeout", "x"], "--timeout: expected seconds above 0"),
    (
        [URL, "--out", "x.json", "--max-num-batched-tokens", "1"],
        "--max-num-batched-tokens: expected 2 to",
    ),
    ([URL, "--out", "x.json", "--max-num-seqs", "0"], "--max-num-seqs: expected 1 to"),
    ([URL, "--out", "x.json", "--name", "a\nb"], "--name: expected 1 to 100 printable characters"),
    ([URL, "--out", "x.json", "--token-ids", "9:1"], "--token-ids: expected two token ids"),
    ([URL, "--out", "x.json", "--api-key", "a", "--api-key-file", "b"], "give one of them"),
    ([URL, "--out", "x.json", "--ca", "/no/such"], "--ca: such: No such file"),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[" ".join(words)[:60] for words, _ in WRONG])
def test_wrong_options_exit_with_2_and_one_line(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words]) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("See `pdproxy")
    ]
    assert len(lines) == 1, lines
    assert says in lines[0]
    assert not list(tmp_path.iterdir())
