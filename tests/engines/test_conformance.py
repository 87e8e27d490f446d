"""`pdproxy conformance` against real engines: NIXL conforms, and a decode engine that computes by itself does not."""

import asyncio
import json
import sys
from typing import Any

import pytest

from .fleet import Fleet

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400, func_only=True)]


async def _proven(*arguments: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the command; return its report, and the verdict of each check."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdproxy", "conformance", "--json", *arguments, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(350):
        said, _ = await process.communicate()
    report: dict[str, Any] = json.loads(said)
    assert report["exit_code"] == process.returncode
    (pair,) = report["pairs"]
    return report, {result["name"]: result["verdict"] for result in pair["results"]}


async def test_nixl_conforms(fleet: Fleet) -> None:
    """All that applies passes, the lease of 30 s too; P and D hold nothing afterwards."""
    fleet.heal()
    p, d = fleet.prefills[0], fleet.decodes[0]
    report, verdicts = await _proven("--prefill", p.url, "--decode", d.url, "--plain", fleet.plain.url)
    assert set(verdicts.values()) == {"passed", "not_applicable"}, json.dumps(report, indent=1)
    assert [name for name, verdict in verdicts.items() if verdict != "passed"] == [
        "notice_each_rank",
        "notice_wait",
        "notice_missing",
    ]
    assert [engine.counters().sum("vllm:kv_cache_usage_perc") for engine in (p, d)] == [0, 0]


async def test_a_decode_engine_that_computes_by_itself_does_not(fleet: Fleet) -> None:
    """Its answers are right: that proves nothing, and only its counters tell."""
    fleet.heal()
    report, verdicts = await _proven(
        "--prefill", fleet.prefills[0].url, "--decode", fleet.plain.url, "--lease-watch", "0"
    )
    assert report["exit_code"] == 1
    assert verdicts["kv_moved"] == "failed"
    assert verdicts["completion"] == "not_judged"
