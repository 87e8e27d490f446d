"""`--engine vllm`, with an environment that looks like vLLM's and simulated engines in its
processes.
"""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.demo.processes import PROMPT, Running, alive, gone, running
from tests.fakes.vllm_box import CPU, GPU, VllmBox


class Box(VllmBox):
    """A machine with a vLLM of ours."""

    @asynccontextmanager
    async def demo(self, *options: str) -> AsyncIterator[Running]:
        line = ("--engine", "vllm", "--vllm", str(self.vllm), "--port", "0", *options)
        async with running(*line, **self.env) as demo:
            yield demo
        assert await gone([self.child]), "the engines' children are left"
        assert not alive([str(self.vllm.parent)])

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
        ({**CPU, "version": "0.20.1"}, "vLLM 0.20.1 is older than 0.26"),
        ({**CPU, "connectors": []}, "vLLM 0.32.0 has no NIXL beside it"),
        (GPU, "and neither nvidia-smi nor amd-smi finds one here"),
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
