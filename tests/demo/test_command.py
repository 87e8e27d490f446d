"""`pdproxy demo` as a process, with simulated engines."""

import asyncio
import json
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from pdproxy.observe.events import LoopBeat
from pdproxy.observe.formats import TextFormatter
from pdproxy.observe.logs import LogObserver
from tests.demo.processes import PROMPT, in_terminal, running, waited

STEP = 120.0
"""Seconds for what takes as long as answers do, which a busy machine makes 16 times slower."""
SHOW_CURSOR, HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


async def shell(line: str) -> bytes:
    process = await asyncio.create_subprocess_shell(
        line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out


def streamed(out: bytes) -> str:
    events = [line[6:] for line in out.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(
        json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]
    )


@pytest.mark.parametrize(
    ("beat", "ignored"), [(LoopBeat(3.2, False, 0.02), True), (LoopBeat(3.2, False, 2.9), False)]
)
def test_a_held_up_loop_is_no_error_only_if_the_machine_stalled(
    beat: LoopBeat, ignored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    LogObserver().notify(beat)
    line = TextFormatter().format(caplog.records[0]) + "\n"
    assert waited(line) is ignored
    assert not waited(f"Traceback\n{line}")


async def test_the_printed_curl_gets_an_answer_and_ctrl_c_ends_with_0() -> None:
    async with running("--port", "0") as demo:
        await demo.until(PROMPT)
        assert streamed(await shell(demo.after("curl ")))
        await demo.until("engines 8/8 up")
        demo.process.send_signal(signal.SIGINT)
        assert await demo.ended() == 0
        assert await demo.errors() == ""


async def test_the_printed_python_gets_an_answer() -> None:
    pytest.importorskip("openai")
    async with running("--port", "0", "--quiet", "--model", 'it\'s a "model"') as demo:
        printed = await demo.until(PROMPT)
        program = printed.partition("openai):\n\n")[2].partition("\n\nCtrl-C")[0]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
        assert (process.returncode, bool(out.strip())) == (0, True)


async def test_without_a_terminal_it_prints_lines_and_a_verdict_and_ends() -> None:
    for seconds in (8, 40):  # a busy machine needs longer
        async with running(
            "--port", "0", "--prefill", "1", "--decode", "1", "--seconds", str(seconds)
        ) as demo:
            assert await demo.ended() == 0
            assert await demo.errors() == ""
        last = next(line for line in reversed(demo.printed) if "engines 4/4 up" in line)
        answered = [int(number) for number in re.findall(r"answered (\d+), failed 0", last)]
        if min(answered, default=0) > 0:
            break
    assert len(answered) == 2
    assert min(answered) > 0
    assert demo.printed[-2].startswith(("Measuring", "No verdict", "Splitting"))


async def test_more_engines_than_are_compared_run_alone() -> None:
    async with running("--port", "0", "--prefill", "1", "--decode", "8") as demo:
        await demo.until("engines 9/9 up")
        demo.process.send_signal(signal.SIGINT)
        assert await demo.ended() == 0
    assert "plain" not in "".join(demo.printed)


async def test_quiet_sends_nothing_and_shows_nothing() -> None:
    async with running("--port", "0", "--quiet", "--seconds", "1.5") as demo:
        assert await demo.ended() == 0
        assert demo.printed[-2:] == [PROMPT, ""]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_other_signals_end_it_as_well(number: signal.Signals) -> None:
    async with running("--port", "0") as demo:
        await demo.until("engines 8/8 up")
        demo.process.send_signal(number)
        assert await demo.ended() == 0
        assert await demo.errors() == ""


async def test_a_second_ctrl_c_ends_it_at_once() -> None:
    async with running("--port", "0") as demo:
        await demo.until(PROMPT)
        port = int(demo.after("curl ").partition("127.0.0.1:")[2].partition("/")[0])
        # A stream of some forty seconds would be waited for.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(
            {
                "model": "sim",
                "prompt": "x " * 40,
                "max_tokens": 8000,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        async with asyncio.timeout(20):
            assert b"200" in await reader.readline()
        demo.process.send_signal(signal.SIGINT)
        await demo.until("ending")
        demo.process.send_signal(signal.SIGINT)
        assert await demo.ended() == 130
        assert "Traceback" not in await demo.errors()
        writer.close()


async def test_a_taken_port_is_told_with_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with running("--port", str(port)) as demo:
            assert await demo.ended() == 2
            assert demo.printed == []
            assert await demo.errors() == (
                f"pdproxy demo: can't listen on 127.0.0.1:{port}: Address already in use (choose "
                f"with --host and --port)\n"
            )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "65536"], "--port: expected 0 to 65535, got '65536'"),
        (["--prefill", "0"], "--prefill: expected 1 to 64, got '0'"),
        (["--plain-chunk", "1"], "--plain-chunk: expected 256 to 16384, got '1'"),
        (["--seconds", "-1"], "--seconds: expected seconds above 0, got '-1'"),
        (["--vllm-args", "'"], "--vllm-args: No closing quotation"),
    ],
)
def test_options_that_cant_be_read_are_told_and_exit_2(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *options]) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "65536"], "--port: expected 0 to 65535, got '65536'"),
        (["--capture", "/no/such/folder"], "--capture: no such folder: /no/such/folder"),
        (["--engine", "vllm", "--vllm", "/no/such/vllm"], "--vllm: /no/such/vllm is no program"),
    ],
)
async def test_wrong_options_are_told_and_exit_2(options: list[str], told: str) -> None:
    async with running(*options) as demo:
        assert await demo.ended() == 2
        errors = await demo.errors()
        assert told in errors
        assert "Traceback" not in errors


async def test_without_vllm_it_says_how_to_get_it(tmp_path: Path) -> None:
    async with running("--engine", "vllm", PATH=str(tmp_path)) as demo:
        assert await demo.ended() == 2
        assert (await demo.errors()).startswith("pdproxy demo: no vllm is on the PATH. Install it")


@pytest.mark.timeout(500)
async def test_a_new_user_sees_a_verdict_and_each_key_does_what_it_says() -> None:
    """Within a minute of entering the command."""
    async with in_terminal(80, 24, "--port", "0") as demo:
        await demo.until(
            r"Splitting (pays|does not pay|gains|makes)|No verdict: this machine is busy"
        )
        await demo.until(r"[1-9]\d* answered", STEP)  # others are under way
        demo.type(b"4")
        await demo.until("Engine 4 is chosen")
        demo.type(b"k")
        await demo.until("was killed|wait some seconds")
        if "was killed" not in demo.text:  # a busy machine: an engine has answered a probe late
            await asyncio.sleep(10)
            demo.type(b"k")
        # What it had under way is served elsewhere, and nothing fails. On a busy machine it may
        # have had nothing, and another engine may seem to be gone as well.
        busy = "this machine is busy" in demo.text
        moved = r"([1-9]\d*\s+streams?|0\s+streams\s+went\s+on\s+elsewhere,\s+[1-9])"
        await demo.until(
            r"plain\s+3\.\s+\d+\s+requests?\s+failed(\s+\([^)]+\))?\.\s+Split:\s+"
            + (r"\d+\s+streams?" if busy else moved),
            STEP,
        )
        await demo.until("4:killed")
        demo.type(b"k")
        await demo.until("Engine 4 starts again")
        for key, said in (
            (b"s", "Engine 4 takes 8 times as long now"),
            (b"-", "The load is 12 req/s now"),
            (b"\x1b[A", "The load is 16 req/s now"),
            (b"l", r"In time now means TTFT . 500 ms, TPOT . 15 ms"),
            (b"a", "auto: 4 engines of role any"),
        ):
            demo.type(key)
            await demo.until(said)
        demo.type(b"q")
        assert await demo.ended() == 0
    assert re.findall(r"(\d+) failed", demo.text)
    if not re.search(r"this machine is busy|was\s+alone\s+there", demo.text):
        assert set(re.findall(r"(\d+) failed", demo.text)) == {"0"}
    assert "Traceback" not in demo.text
    assert demo.seen.rfind(SHOW_CURSOR) > demo.seen.rfind(HIDE_CURSOR)
    assert demo.seen.rfind(LEAVE_SCREEN) > demo.seen.rfind(ENTER_SCREEN) >= 0


async def test_ctrl_c_ends_the_comparison_in_a_terminal() -> None:
    async with in_terminal(120, 40, "--port", "0") as demo:
        await demo.until("Measuring")
        demo.type(b"\x03")
        assert await demo.ended() == 0
    assert "curl -N 127.0.0.1:" in demo.text
    assert "Traceback" not in demo.text


async def test_the_view_is_drawn_without_traffic_and_in_a_small_terminal() -> None:
    async with in_terminal(60, 10, "--port", "0", "--quiet") as demo:
        await demo.until("4 engines, 4 up")
        demo.type(b"\x03")
        assert await demo.ended() == 0
    assert "yours alone" in demo.text
    assert "Traceback" not in demo.text


async def test_what_was_last_shown_is_kept_as_svg_in_each_size(tmp_path: Path) -> None:
    async with running("--port", "0", "--seconds", "2", "--capture", str(tmp_path)) as demo:
        assert await demo.ended() == 0
    for size in ("80x24", "120x40", "200x60"):
        svg = (tmp_path / f"demo-{size}.svg").read_text()
        assert svg.startswith("<svg")
        assert "decode" in svg
