"""`--engine vllm`, with an environment that looks like vLLM's and simulated engines in its
processes.
"""

import json
import os
import shlex
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy_lab.demo.figures import ShownEngine
from pdproxy_lab.demo.options import DemoError
from pdproxy_lab.demo.vllm.find import FoundVllm, interpreter_of, judge, visible_gpus
from pdproxy_lab.demo.vllm.flags import Model, arguments, environment
from tests.demo.processes import PROMPT, Running, alive, gone, running

CPU = {"version": "0.32.0", "nixl": True, "gpus": 0, "cpu": True}
PYTHON = Path("/venv/bin/python")
MODEL = Model("/models/tiny", "tiny", local=True)
PREFILL, DECODE = ShownEngine("0", "prefill", "http://x"), ShownEngine("0", "decode", "http://x")


class Box:
    """A machine with a vLLM of ours."""

    def __init__(self, folder: Path, **orders: Any) -> None:
        self.folder = folder
        # A number of seconds that no other process sleeps: engines and what they start are found by
        # it.
        self.child = f"{600 + uuid.uuid4().int % 10**9 / 10**9:.9f}"
        self.orders = {"look": CPU, "notes": str(folder / "notes"), "child": self.child, **orders}
        for name in ("bin", "notes", "tmp"):
            (folder / name).mkdir()
        python = folder / "bin" / "python"
        fake = Path(__file__).with_name("fake_python.py")
        python.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(fake))} "$@"\n'
        )
        self.vllm = folder / "bin" / "vllm"
        self.vllm.write_text(f"#!{python}\n")
        for path in (python, self.vllm):
            path.chmod(0o755)

    @asynccontextmanager
    async def demo(self, *options: str) -> AsyncIterator[Running]:
        env = {"FAKE_VLLM": json.dumps(self.orders), "XDG_CACHE_HOME": str(self.folder / "cache")}
        env["TMPDIR"] = str(self.folder / "tmp")
        line = ("--engine", "vllm", "--vllm", str(self.vllm), "--port", "0", *options)
        async with running(*line, **env) as demo:
            yield demo
        assert await gone([self.child]), "the engines' children are left"
        assert not alive([str(self.vllm.parent)])

    def notes(self, role: str) -> list[dict[str, Any]]:
        return [json.loads(note.read_text()) for note in (self.folder / "notes").glob(f"{role}-*")]

    @property
    def logs(self) -> list[Path]:
        return sorted((self.folder / "tmp").glob("pdproxy-demo-*/*"))


async def test_engines_are_started_waited_for_in_words_and_ended_without_remains(
    tmp_path: Path,
) -> None:
    box = Box(tmp_path)
    async with box.demo("--decode", "2") as demo:
        await demo.until("engines 3/3 up")
        for name in ("prefill 0", "decode 0", "decode 1"):
            said = [line for line in demo.printed if line.startswith(name)]
            assert "starting on the CPU" in said[0]
            assert said[-1].startswith(f"{name}: ready after")
        assert len(box.logs) == 3
        demo.process.send_signal(signal.SIGINT)
        assert await demo.ended() == 0
        assert await demo.errors() == ""
    assert box.logs == []
    ports = [
        note["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        for role in ("prefill", "decode")
        for note in box.notes(role)
    ]
    assert len(set(ports)) == 3


async def test_the_tiny_model_is_made_once(tmp_path: Path) -> None:
    box = Box(tmp_path, die="prefill")
    for _ in range(2):
        async with box.demo() as demo:
            assert await demo.ended() == 1
    models = list((tmp_path / "cache" / "pdproxy").iterdir())
    assert len(models) == 1
    assert {note["argv"][note["argv"].index("--model") + 1] for note in box.notes("prefill")} == {
        str(models[0])
    }


async def test_an_engine_that_dies_ends_the_demo_with_the_end_of_its_log(tmp_path: Path) -> None:
    box = Box(tmp_path, die="decode")
    async with box.demo() as demo:
        assert await demo.ended() == 1
        errors = await demo.errors()
    assert "decode 0 died while starting; its log, " in errors
    assert "out of luck" in errors
    assert "exited with 3" in errors
    assert "Traceback" not in errors
    assert len(box.logs) == 2


async def test_engines_that_take_too_long_are_given_up(tmp_path: Path) -> None:
    box = Box(tmp_path, slow=True)
    async with box.demo("--wait", "3") as demo:
        assert await demo.ended() == 1
        errors = await demo.errors()
    assert "the engines were not ready within 3 s (--wait); logs: prefill 0: " in errors
    assert "Traceback" not in errors


async def test_ctrl_c_while_engines_start_ends_them(tmp_path: Path) -> None:
    box = Box(tmp_path, slow=True)
    async with box.demo() as demo:
        await demo.until("decode 0: starting")
        demo.process.send_signal(signal.SIGINT)
        assert await demo.ended() == 0
        assert await demo.errors() == ""


async def test_a_demo_that_is_killed_leaves_no_engine(tmp_path: Path) -> None:
    box = Box(tmp_path)
    async with box.demo() as demo:
        await demo.until(PROMPT)
        demo.process.kill()
        assert await demo.ended() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("look", "told"),
    [
        ({**CPU, "version": None}, "there is no vLLM in "),
        ({**CPU, "nixl": False}, "vLLM 0.32.0 has no NIXL beside it"),
        ({**CPU, "cpu": False}, "is built for GPUs and sees none here"),
        ({**CPU, "gpus": 1}, "2 engines need a GPU each, and vLLM sees 1"),
        ({}, "reports something unexpected about vLLM"),
    ],
)
async def test_what_can_not_work_is_told_before_anything_starts(
    tmp_path: Path, look: dict[str, Any], told: str
) -> None:
    box = Box(tmp_path, look=look)
    async with box.demo() as demo:
        assert await demo.ended() == 2
        assert told in await demo.errors()
    assert not any((tmp_path / "notes").iterdir())


def test_a_cpu_needs_flags_and_environment_of_its_own() -> None:
    line = arguments(PYTHON, MODEL, DECODE, 8300, cpu=True, more=["--max-model-len", "512"])
    assert line[:5] == [
        "/venv/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "/models/tiny",
    ]
    transfer = json.loads(line[line.index("--kv-transfer-config") + 1])
    assert transfer == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_buffer_device": "cpu",
    }
    assert line[-2:] == ["--max-model-len", "512"]
    env = environment({"UCX_TLS": "mine"}, MODEL, 5600, gpu=None, threads=3)
    assert (env["UCX_TLS"], env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == ("mine", "3", "1")


def test_a_gpu_is_each_engines_own() -> None:
    line = arguments(PYTHON, Model("org/model", "org/model"), PREFILL, 8200, cpu=False, more=[])
    assert json.loads(line[line.index("--kv-transfer-config") + 1]) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
    }
    assert "--dtype" not in line
    env = environment(
        {"CUDA_VISIBLE_DEVICES": "0,1"}, Model("org/model", "org/model"), 5600, gpu="1", threads=1
    )
    assert (env["CUDA_VISIBLE_DEVICES"], env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("1", "5600")
    assert "HF_HUB_OFFLINE" not in env


@pytest.mark.parametrize(
    ("said", "count", "names"),
    [
        (None, 2, ["0", "1"]),
        ("3,5", 2, ["3", "5"]),
        ("GPU-a, GPU-b", 2, ["GPU-a", "GPU-b"]),
        ("3,5,9", 2, ["3", "5"]),
        ("", 0, []),
    ],
)
def test_gpus_are_named_as_the_environment_names_them(
    said: str | None, count: int, names: list[str]
) -> None:
    assert visible_gpus(said, count) == names


def test_enough_gpus_are_enough() -> None:
    found = FoundVllm(version="0.32.0", nixl=True, gpus=2, cpu=False)
    judge(found, PYTHON, 2)
    with pytest.raises(DemoError, match="3 engines need a GPU each, and vLLM sees 2"):
        judge(found, PYTHON, 3)


def test_the_interpreter_is_the_scripts_own(tmp_path: Path) -> None:
    script, beside = tmp_path / "vllm", tmp_path / "python"
    script.write_text("#!/usr/bin/env python3\n")
    with pytest.raises(DemoError, match="can't tell which Python"):
        interpreter_of(script)
    beside.touch()
    assert interpreter_of(script) == beside
    script.write_text(f"#!{sys.executable} -s\n")
    assert interpreter_of(script) == Path(sys.executable)
    link = tmp_path / "elsewhere"
    link.mkdir()
    os.symlink(script, link / "vllm")
    assert interpreter_of(link / "vllm") == Path(sys.executable)
