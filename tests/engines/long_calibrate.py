"""From a real engine to a prediction: `pdproxy calibrate`, then `pdproxy bench` with the profile
beside the engine.
"""

# A CPU engine shares two cores with its client, so its own times vary. What is compared are
# medians.

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .build import ensure
from .engine import Engine
from .launcher import Launcher

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200, func_only=True)]

TOLERANCE = 0.25


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A plain engine, whose prefix cache is off: prompts of the same run have nothing in common
    anyway.
    """
    launcher = Launcher(ensure())
    made = Engine.start(
        launcher,
        "calibrated",
        "plain",
        flags="--no-enable-prefix-caching --max-num-batched-tokens 512",
    )
    try:
        yield made.wait()
    finally:
        made.stop()
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
    """TTFT and TPOT: the medians of three runs of a minute each, within 25 % of the simulated
    ones.
    """
    profile = tmp_path / "cpu.json"
    await pdproxy(
        *(
            "calibrate",
            engine.url,
            "--out",
            str(profile),
            "--max-seconds",
            "240",
            "--max-num-seqs",
            "16",
        ),
        *("--token-ids", "300:2000", "--accelerator", "2 cores"),
    )
    step = json.loads(profile.read_text())["hardware"]["decode_step_s"]
    prompt = 600 / json.loads(profile.read_text())["hardware"]["prefill_tokens_per_s"]
    rate = 0.4 / (prompt + 32 * step)  # so that requests meet, and no queue grows
    report = await pdproxy(
        *(
            "bench",
            f"engine={engine.url}",
            "--profile",
            str(profile),
            "--rate",
            f"{rate:.2f}",
            "--duration",
            "60",
        ),
        *(
            "--seeds",
            "3",
            "--input-tokens",
            "600",
            "--output-tokens",
            "32",
            "--token-ids",
            "300:2000",
            "--allow-lag",
        ),
    )
    for name in ("TTFT p50", "TPOT p50"):
        line = re.search(rf"^{name} \(ms\) +([\d.]+) \([^)]*\) +([\d.]+) \(", report, re.MULTILINE)
        assert line is not None, name
        seen, said = float(line[1]), float(line[2])
        assert said == pytest.approx(seen, rel=TOLERANCE), name
