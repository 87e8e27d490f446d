"""The line that shows how far a command is."""

import io
import sys

import pytest

from pdproxy.cli.main import main
from pdproxy_lab.cli.progress import ProgressLine, left_text, seconds_left

CLEAR = "\r\x1b[K"
LOAD = ("--input-tokens", "100", "--output-tokens", "8", "--seeds", "2")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def test_the_line_is_written_anew_now_and_then_and_is_empty_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = shown_on(monkeypatch)
    now = [0.0]
    with ProgressLine(clock=lambda: now[0]) as line:
        line.show("first")
        line.show("too early")
        now[0] = 1.0
        line.show("x" * 500)
    assert terminal.getvalue() == f"{CLEAR}first{CLEAR}{'x' * 80}{CLEAR}"


def test_nothing_is_written_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with ProgressLine() as line:
        line.show("text")
    assert shown.getvalue() == ""


def test_what_is_left_follows_from_what_is_done() -> None:
    assert seconds_left(100.0, 130.0, 0.25) == ", 90 seconds left"
    assert seconds_left(100.0, 130.0, 0.0) == ""
    assert [left_text(seconds) for seconds in (-1, 41.2, 120, 1800)] == [
        "0 seconds left",
        "41 seconds left",
        "120 seconds left",
        "30 minutes left",
    ]


def test_a_simulation_shows_its_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = shown_on(monkeypatch)
    monkeypatch.setattr("pdproxy_lab.cli.progress._PAUSE", 0.0)
    words = ["simulate", "--aggregated", "1", "--rate", "9", "--requests", "400", *LOAD]
    assert main(words) == 0
    assert f"{CLEAR}run 1 of 2: 100 requests" in terminal.getvalue()
    assert f"{CLEAR}run 2 of 2, 0 seconds left: 400 requests" in terminal.getvalue()
    assert terminal.getvalue().endswith(CLEAR)
    assert "TTFT" in capsys.readouterr().out


def test_a_plan_shows_what_it_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    monkeypatch.setattr("pdproxy_lab.cli.progress._PAUSE", 0.0)
    words = ["plan", "--gpus", "2", "--slo", "ttft=500ms", "--requests", "50", *LOAD]
    assert main([*words, "--chunks", "512,8192"]) == 0
    assert f"{CLEAR}2 GPUs: arrangement 1, 0 simulations{CLEAR}" in terminal.getvalue()
    assert ", best so far " in terminal.getvalue()
    assert terminal.getvalue().endswith(CLEAR)
