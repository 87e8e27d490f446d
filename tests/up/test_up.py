"""`pdproxy up` from its start to its end, with simulated engines as processes."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from tests.demo.processes import running
from tests.fakes.vllm_box import GPU, nvidia_smi
from tests.up.processes import SERVES, load, machine
from tests.up.test_nvidia_gpus import LISTED, TOPO, USED

pytestmark = pytest.mark.timeout(240)


async def test_from_nothing_to_answers_with_one_engine_killed_under_load(tmp_path: Path) -> None:
    async with machine(tmp_path, speed="1") as box, box.up() as up:
        printed = await up.until(SERVES)
        for name in ("any-0", "any-1"):
            assert f"{name}: ready after" in printed
        assert "ready: KV moves in 2 of 2 pairs" in printed
        assert f"curl -N 127.0.0.1:{box.port}/v1/chat/completions" in printed
        # a request that is alone at the engine that ends gets no other one of two
        async with load(box.url, clients=24) as clients:
            await clients.until(60)
            killed = box.pid("any-0")
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            await up.until("any-0 was killed by signal 9, and starts again in 1 s")
            up.printed.clear()
            await up.until("any-0: ready after")
            await clients.until(30)
        assert box.pid("any-0") not in (None, killed)
        up.process.send_signal(signal.SIGTERM)
        assert await up.ended() == 0
        assert await up.errors() == ""


async def test_the_proxy_runs_on_while_no_engine_serves(tmp_path: Path) -> None:
    async with machine(tmp_path, speed="1") as box, box.up("--arrangement", "1A") as up:
        await up.until(SERVES)
        proxy = box.pid("proxy")
        engine = f"http://127.0.0.1:{box.first_port}"
        admin = ("--admin", f"unix:{box.up_folder}/admin.sock")
        async with running("drain", engine, *admin, command="engines") as drain:
            assert await drain.ended() == 0
        async with aiohttp.ClientSession() as session:
            for _ in range(44):  # as long as an engine may say that its core is dead, and again
                async with session.get(f"{box.url}/ready") as answer:
                    assert answer.status == 503
                assert box.pid("proxy") == proxy
                await asyncio.sleep(0.5)
        up.process.send_signal(signal.SIGTERM)
        assert await up.ended() == 0


async def test_other_flags_reach_each_engine_under_load_and_wrong_ones_none(tmp_path: Path) -> None:
    async with machine(tmp_path, speed="1") as box, box.up("--arrangement", "1P1D") as up:
        await up.until(SERVES)
        async with load(box.url) as clients:
            await clients.until(20)
            options = ("--arrangement", "1P1D", "--apply")
            code, printed, errors = await box.run(*options, "--", "--max-num-seqs", "64")
            assert (code, errors) == (0, "")
            assert printed.endswith("changed: prefill-0, decode-0")
            await clients.until(20)
            code, printed, errors = await box.run(*options, "--", "--dtype=wrong")
            assert code == 1
            assert "out of luck" in printed
            assert "prefill-0 does not start with these flags and runs as before" in errors
            await clients.until(20)
        for role in ("prefill", "decode"):
            assert sum("64" in note["argv"] for note in box.notes(role)) >= 1
        assert "max_num_seqs: 64" not in (box.up_folder / "pdproxy.yaml").read_text()
        code, _, errors = await box.run("--arrangement", "2A", "--apply")
        assert code == 2
        assert "--apply can't change the engines, their GPUs and ports" in errors
        code, _, errors = await box.run()
        assert code == 2
        assert "another `pdproxy up` runs with the folder" in errors
        up.process.send_signal(signal.SIGINT)
        assert await up.ended() == 0


async def test_what_a_killed_up_has_left_is_found_and_used_or_ended(tmp_path: Path) -> None:
    async with machine(tmp_path) as box:
        async with box.up() as first:
            await first.until(SERVES)
            first.process.kill()
            await first.ended()
        pids = [box.pid(name) for name in ("any-0", "any-1", "proxy")]
        assert None not in pids
        async with box.up() as second:
            printed = await second.until(SERVES)
            for name, pid in zip(("any-0", "any-1", "proxy"), pids, strict=True):
                assert f"{name} runs already: process {pid}" in printed
            second.process.kill()
            await second.ended()
        async with box.up("--", "--max-num-seqs", "8") as third:
            printed = await third.until(SERVES)
            for name, pid in zip(("any-0", "any-1", "proxy"), pids, strict=True):
                assert f"{name}, process {pid}, is left of an earlier start: ends it" in printed, (
                    printed
                )
            assert not {box.pid(name) for name in ("any-0", "any-1", "proxy")} & {*pids, None}
            third.process.send_signal(signal.SIGINT)
            assert await third.ended() == 0
        assert len(box.notes("any")) == 4


async def test_an_engine_that_does_not_start_ends_all_with_its_last_lines(tmp_path: Path) -> None:
    async with machine(tmp_path, die="decode") as box:
        code, _, errors = await box.run("--arrangement", "1P1D")
        assert code == 1
        assert "decode-0 ended with exit code 3 while it started; its log, " in errors
        assert errors.endswith("out of luck\n")
        assert "Traceback" not in errors


async def test_an_engine_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async with machine(tmp_path, slow=True) as box:
        code, _, errors = await box.run("--wait", "1")
        assert code == 1
        assert "was not ready within 1 s (--wait)" in errors


@pytest.mark.parametrize(
    "stage", ["any-1  CPU", "any-1: loads the weights", "checks each pair", "proxy: ready", SERVES]
)
async def test_ctrl_c_at_each_stage_leaves_nothing(tmp_path: Path, stage: str) -> None:
    async with machine(tmp_path) as box, box.up() as up:
        await up.until(stage)
        up.process.send_signal(signal.SIGINT)
        assert await up.ended() == 0
        assert await up.errors() == ""


async def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    async with machine(tmp_path, speed="0.02") as box, box.up() as up:
        await up.until(SERVES)
        body = {"model": "tiny", "prompt": "some words", "max_tokens": 1000, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            # an answer that would take longer than the test
            asking = asyncio.create_task(session.post(f"{box.url}/v1/completions", json=body))
            while "pdproxy_inflight 1" not in await box.metrics(session):
                await asyncio.sleep(0.05)
            up.process.send_signal(signal.SIGINT)
            await up.until("Ctrl-C again: at once")
            up.process.send_signal(signal.SIGINT)
            assert await up.ended() == 130
            assert not asking.done() or asking.exception() is not None
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def test_what_can_not_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async with machine(tmp_path) as box:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", box.port))
            other.listen()
            code, _, errors = await box.run()
        assert code == 2
        assert f"the proxy can't listen on 127.0.0.1:{box.port}: another process listens" in errors
        code, _, errors = await box.run("--vllm", str(tmp_path / "nothing"))
        assert code == 2
        assert "is no program. Install it in an environment of its own" in errors
        box.orders["look"] = GPU
        nvidia_smi(tmp_path / "bin", LISTED, USED, TOPO)
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        code, _, errors = await box.run("--gpus", "0-1", PATH=path)
        assert code == 2
        assert "GPU 1 can't be used: it is in use by process 4242 (/usr/bin/python3" in errors
        assert box.notes("any") == []
