"""`pdproxy conformance` on real engines of every connector that runs on a CPU."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from .connected import lmcache_settings
from .engine import Engine
from .fleet import Fleet
from .long_lmcache import Pushing, lmcache_launcher, pushing
from .long_notifier import Pair, pair
from .long_shared import sharers

__all__ = ["lmcache_launcher", "pair", "pushing", "sharers"]  # fixtures

pytestmark = [pytest.mark.engines, pytest.mark.timeout(500, func_only=True)]


async def _proven(*arguments: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the command; return its report and the verdict of each check."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdproxy",
        "conformance",
        "--json",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(350):
        output, _ = await process.communicate()
    report: dict[str, Any] = json.loads(output)
    assert report["exit_code"] == process.returncode
    (pair,) = report["pairs"]
    return report, {result["name"]: result["verdict"] for result in pair["results"]}


def _not_passed(report: dict[str, object], verdicts: dict[str, str]) -> set[str]:
    """Return the checks that don't apply; a failed check fails the test and shows the whole
    report.
    """
    assert set(verdicts.values()) <= {"passed", "not_applicable"}, json.dumps(report, indent=1)
    return {name for name, verdict in verdicts.items() if verdict != "passed"}


async def test_the_notifier(pair: Pair) -> None:
    """NIXL with the notifier: each rank sends notices, and they end the wait."""
    port = pair.address.rpartition(":")[2]
    flags = ("--kv-notifier", "true", "--kv-ready-port", port)
    report, verdicts = await _proven(
        "--prefill", pair.prefill.url, "--decode", pair.decode.url, *flags
    )
    assert _not_passed(report, verdicts) <= {"notice_wait", "notice_missing"}


async def test_lmcache(pushing: Pushing, tmp_path: Path) -> None:
    """LMCache's PD mode: push, notice, read."""
    config = tmp_path / "lmcache.yaml"
    config.write_text(json.dumps(lmcache_settings(pushing.fleet, pushing.ports)))
    report, verdicts = await _proven("--config", str(config), "--plain", pushing.fleet.plain.url)
    assert _not_passed(report, verdicts) <= {"release", "lease"}


async def test_shared(sharers: Fleet, plain: Engine) -> None:
    """Files between the engines."""
    engines = (
        "--prefill",
        sharers.prefills[0].url,
        "--decode",
        sharers.decodes[0].url,
        "--plain",
        plain.url,
    )
    report, verdicts = await _proven(*engines, "--connector", "shared")
    notices = {"notice_each_rank", "notice_wait", "notice_missing"}
    assert _not_passed(report, verdicts) <= {"release", "lease", *notices}


async def test_nixl_conforms(fleet: Fleet) -> None:
    """All checks that apply pass, also that of the 30 s lease; P and D hold nothing afterwards."""
    fleet.heal()
    p, d = fleet.prefills[0], fleet.decodes[0]
    report, verdicts = await _proven(
        "--prefill", p.url, "--decode", d.url, "--plain", fleet.plain.url
    )
    assert set(verdicts.values()) == {"passed", "not_applicable"}, json.dumps(report, indent=1)
    assert [name for name, verdict in verdicts.items() if verdict != "passed"] == [
        "notice_each_rank",
        "notice_wait",
        "notice_missing",
    ]
    assert [engine.counters().sum("vllm:kv_cache_usage_perc") for engine in (p, d)] == [0, 0]


async def test_a_decode_engine_that_recomputes_does_not_conform(fleet: Fleet) -> None:
    """Its answers are right; only its counters show the recomputation."""
    fleet.heal()
    report, verdicts = await _proven(
        "--prefill", fleet.prefills[0].url, "--decode", fleet.plain.url, "--lease-watch", "0"
    )
    assert report["exit_code"] == 1
    assert verdicts["kv_moved"] == "failed"
    assert verdicts["completion"] == "not_judged"
