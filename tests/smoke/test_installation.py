"""Whether an installation works: `pytest tests/smoke` starts the commands as an operator does, in
under a minute.
"""

# Three simulated engines and the proxy, each a process of its own; nothing of these is looked into.
# The installation is that of this Python, or of the one that PDPROXY_TEST_PYTHON names.

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.ports import free_port

PATIENCE = 60.0
TEXT = "The river and the mountain, the harbour and the ledger, the copper and the window. "
PROMPT: dict[str, Any] = {"prompt": TEXT * 2}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT * 2}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": PROMPT | {"max_tokens": 8},
    "/v1/chat/completions": MESSAGES | {"max_tokens": 8},
    "/v1/responses": {"input": TEXT * 2, "max_output_tokens": 8},
    "/v1/messages": MESSAGES | {"max_tokens": 8},
}
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")}
ENVIRONMENT["PDPROXY_LISTEN__LINGER"] = "0"
if other := os.environ.get("PDPROXY_TEST_PYTHON"):
    ENVIRONMENT.pop("PYTHONPATH", None)
PYTHON = other or sys.executable


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    line = [PYTHON, "-m", "pdproxy", *arguments]
    return subprocess.run(
        line, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


class Running:
    """Processes of the package, and how to ask them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}

    def start(self, name: str, *arguments: str) -> None:
        """Start a command that listens on a port of its own. What it says goes to a file."""
        port = self.ports[name] = free_port()
        line = [PYTHON, "-m", "pdproxy", *arguments, "--port", str(port)]
        with (self._folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(line, env=ENVIRONMENT, stdout=log, stderr=log)

    def said(self, name: str) -> str:
        """What a process has said so far."""
        return (self._folder / f"{name}.log").read_text()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def ask(self, name: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Ask a process. Return the status and the body."""
        connection = HTTPConnection("127.0.0.1", self.ports[name], timeout=PATIENCE)
        try:
            headers = {"content-type": "application/json"}
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def until(self, name: str, path: str, holds: Any) -> None:
        """Wait until a process answers so."""
        end, found = time.monotonic() + PATIENCE, b""
        while time.monotonic() < end:
            assert self.processes[name].poll() is None, self.said(name)
            try:
                status, found = self.ask(name, path)
                if status == 200 and holds(found):
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"{name}: {found!r}\n{self.said(name)}")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A prefill engine, two decode engines, and the proxy in front of them."""
    made = Running(tmp_path_factory.mktemp("smoke"))
    with ExitStack() as stack:
        stack.callback(ended, made)
        for name, role in (("p", "prefill"), ("d1", "decode"), ("d2", "decode")):
            side = ("--side-channel-port", str(free_port()))
            made.start(name, "sim", "--role", role, *side, "--decode-step-s", "0.05")
        decodes = ("--decode", made.url("d1"), made.url("d2"))
        made.start("proxy", "serve", "--prefill", made.url("p"), *decodes)
        for name in ("p", "d1", "d2"):
            made.until(name, "/health", lambda _: True)
        made.until("proxy", "/ready", lambda body: json.loads(body)["state"] == "ok")
        yield made


def ended(running: Running) -> None:
    """End all that still runs, and wait for it."""
    for process in running.processes.values():
        process.terminate()
    for process in running.processes.values():
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_the_command_is_there() -> None:
    done = command("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("pdproxy ")


def test_settings_are_checked(tmp_path: Path) -> None:
    """A file with all settings is right; a wrong one is named in one line."""
    file = tmp_path / "pdproxy.yaml"
    assert command("config", "init", "--all", "--out", str(file)).returncode == 0
    good = command(
        "config",
        "validate",
        "--config",
        str(file),
        "--prefill",
        "127.0.0.1:1",
        "--decode",
        "127.0.0.1:2",
    )
    assert good.returncode == 0, good.stderr
    file.write_text("limits: {attempts: none}\n")
    wrong = command("config", "validate", "--config", str(file))
    assert wrong.returncode == 2
    assert "limits.attempts" in wrong.stderr


def test_the_engines_can_work_together(running: Running) -> None:
    done = command("check", "--prefill", running.url("p"), "--decode", running.url("d1"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
def test_a_route_answers_as_an_engine_does(running: Running, path: str, stream: bool) -> None:
    """The text is the engine's own."""
    body = ROUTES[path] | {"model": "sim", "temperature": 0, "stream": stream}
    (status, ours), (_, plain) = (running.ask(name, path, body) for name in ("proxy", "d2"))
    assert status == 200, ours
    assert text_of(ours, stream=stream) == text_of(plain, stream=stream) != ""


def text_of(body: bytes, *, stream: bool) -> str:
    """The text of an answer of any of the routes."""
    if not stream:
        return "".join(_texts(json.loads(body)))
    lines = [
        line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {")
    ]
    events = [json.loads(line) for line in lines]
    assert not any("error" in event for event in events if event.get("error")), body
    deltas = [event["delta"] for event in events if isinstance(event.get("delta"), str)]
    return "".join(deltas or _texts(events))


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    if not isinstance(value, dict):
        return []
    own = [value[name] for name in ("text", "content") if isinstance(value.get(name), str)]
    return own + [text for item in value.values() for text in _texts(item)]


def test_the_prompts_were_split_and_their_kv_was_released(running: Running) -> None:
    """The metrics say so."""
    running.until(
        "proxy",
        "/metrics",
        lambda page: _sum(page, b"pdproxy_kv_handles_ended_total", b'end="loaded"') > 0,
    )
    status, page = running.ask("proxy", "/metrics")
    assert status == 200
    assert _sum(page, b"pdproxy_requests_total") > 0


def _sum(page: bytes, name: bytes, *labels: bytes) -> float:
    lines: Sequence[bytes] = [line for line in page.splitlines() if line.startswith(name)]
    return sum(
        float(line.rpartition(b" ")[2]) for line in lines if all(label in line for label in labels)
    )


def test_an_engine_that_is_killed_loses_no_request(running: Running) -> None:
    """Streams that are under way at both decode engines go on when one is killed, and new requests
    are answered.
    """
    body = PROMPT | {"model": "sim", "temperature": 0, "max_tokens": 60, "stream": True}
    _, plain = running.ask("d2", "/v1/completions", body)
    with ExitStack() as stack:
        answers = []
        for _ in range(2):
            connection = HTTPConnection("127.0.0.1", running.ports["proxy"], timeout=PATIENCE)
            stack.callback(connection.close)
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            answers.append(connection.getresponse())
        firsts = [answer.readline() for answer in answers]
        running.processes["d1"].kill()
        running.processes["d1"].wait()
        for first, answer in zip(firsts, answers, strict=True):
            whole = first + answer.read()
            assert b"data: [DONE]" in whole, whole
            assert text_of(whole, stream=True) == text_of(plain, stream=True)
    for path in ("/v1/completions", "/v1/chat/completions") * 2:
        status, answered = running.ask("proxy", path, ROUTES[path] | {"model": "sim"})
        assert status == 200, answered


def test_it_ends_when_it_is_told_to(running: Running) -> None:
    running.processes["proxy"].terminate()
    assert running.processes["proxy"].wait(PATIENCE) == 0, running.said("proxy")
