"""From real engines to a prediction: `pdproxy calibrate`, then `pdproxy bench` with the profile beside the engine; and a pair.

A CPU engine shares two cores with its client, so its own times vary. What is compared are medians.
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdproxy.engine_model.profile import load

from .build import ensure
from .engine import Engine
from .launcher import Launcher

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200, func_only=True)]

TOLERANCE = 0.25


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A plain engine, whose prefix cache is off: prompts of the same run have nothing in common anyway."""
    launcher = Launcher(ensure())
    made = Engine.start(
        launcher, "calibrated", "plain", flags="--no-enable-prefix-caching --max-num-batched-tokens 512"
    )
    try:
        yield made.wait()
    finally:
        made.stop()
        launcher.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine with NIXL, without prefix caches."""
    launcher = Launcher(ensure())
    flags = "--no-enable-prefix-caching --max-num-batched-tokens 512"
    made: list[Engine] = []
    try:
        made.append(Engine.start(launcher, "calibrated-p", "prefill", flags=flags))
        made.append(Engine.start(launcher, "calibrated-d", "decode", flags=flags))
        yield made[0].wait(), made[1].wait()
    finally:
        for engine in made:
            engine.stop()
        launcher.close()


async def pdproxy(*line: str) -> str:
    """Run a command; return what it printed. Fails if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdproxy",
        *line,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    print("\n" + output.decode())
    assert process.returncode == 0, output.decode()[-3000:]
    return output.decode()


async def test_a_calibrated_profile_predicts_the_engine(engine: Engine, tmp_path: Path) -> None:
    """TTFT and TPOT: the medians of three runs of a minute each, within 25 % of the simulated ones."""
    profile = tmp_path / "cpu.json"
    await pdproxy(
        *("calibrate", engine.url, "--out", str(profile), "--max-seconds", "240", "--max-num-seqs", "16"),
        *("--token-ids", "300:2000", "--accelerator", "2 cores"),
    )
    step = json.loads(profile.read_text())["hardware"]["decode_step_s"]
    prompt = 600 / json.loads(profile.read_text())["hardware"]["prefill_tokens_per_s"]
    rate = 0.4 / (prompt + 32 * step)  # so that requests meet, and no queue grows
    report = await pdproxy(
        *("bench", f"engine={engine.url}", "--profile", str(profile), "--rate", f"{rate:.2f}", "--duration", "60"),
        *("--seeds", "3", "--input-tokens", "600", "--output-tokens", "32", "--token-ids", "300:2000", "--allow-lag"),
    )
    for name in ("TTFT p50", "TPOT p50"):
        line = re.search(rf"^{name} \(ms\) +([\d.]+) \([^)]*\) +([\d.]+) \(", report, re.MULTILINE)
        assert line is not None, name
        seen, said = float(line[1]), float(line[2])
        assert said == pytest.approx(seen, rel=TOLERANCE), name


async def test_a_calibrated_pair_explains_its_own_trials(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    """TTFT through the pair, of prompts of 1,024 tokens, within 25 %. Both engines and the client share two cores.

    A pull of 1,024 tokens of this small model is posted within a few milliseconds: no stall that is longer may be made up.
    """
    prefill, decode = pair
    out = tmp_path / "pair.json"
    report = await pdproxy(
        *("calibrate", "--prefill", prefill.url, "--decode", decode.url, "--connector", "nixl", "--out", str(out)),
        *("--max-seconds", "240", "--max-num-seqs", "16", "--token-ids", "300:2000", "--accelerator", "2 cores"),
    )
    hardware = load(str(out)).hardware
    stall = hardware.step_s(0, 2, pulls=1, pulled_tokens=1024) - hardware.step_s(0, 2)
    print(f"a pull of 1,024 tokens stalls for {1e3 * stall:.2f} ms of steps of {1e3 * hardware.step_s(0, 2):.2f} ms")
    assert 0 <= stall < 0.02
    name = "a prompt of 1024 tokens through the pair"
    line = re.search(rf"^{name} +TTFT +\d+ +([\d.]+) ms +([\d.]+) ms", report, re.MULTILINE)
    assert line is not None
    assert float(line[2]) == pytest.approx(float(line[1]), rel=TOLERANCE)
