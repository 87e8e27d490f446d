"""`pdproxy check` with real engines: no findings for good engines, the right finding for a wrong
one.
"""

import asyncio
import json
import sys
from typing import Any

import pytest

from .fleet import Fleet

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]


async def _check(*arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdproxy",
        "check",
        "--json",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(200):
        output, _ = await process.communicate()
    report: dict[str, Any] = json.loads(output)
    assert report["exit_code"] == process.returncode
    return report


async def test_good_engines_pass(fleet: Fleet) -> None:
    """Two engines of each role: every pair moves KV, and no KV is left on a prefill engine."""
    fleet.heal()
    prefills, decodes = [one.url for one in fleet.prefills], [one.url for one in fleet.decodes]
    report = await _check("--prefill", *prefills, "--decode", *decodes)
    assert report["exit_code"] == 0, report["findings"]
    assert not [one for one in report["findings"] if one["level"] == "error"], report["findings"]
    assert len(report["pairs"]) == 4
    assert all(engine.counters().sum("vllm:kv_cache_usage_perc") == 0 for engine in fleet.prefills)


async def test_a_decode_engine_without_a_connector_is_named(fleet: Fleet) -> None:
    """It recomputes and answers correctly: only its counters show it, and the remedy is a flag."""
    fleet.heal()
    report = await _check("--prefill", fleet.prefills[0].url, "--decode", fleet.plain.url)
    assert report["exit_code"] == 1
    errors = [one for one in report["findings"] if one["level"] == "error"]
    assert any(
        fleet.plain.url in json.dumps(one) and "kv-transfer-config" in one["remedy"]
        for one in errors
    ), errors


async def test_swapped_roles_are_named(fleet: Fleet) -> None:
    """NIXL ignores the roles; the metrics of a consumer show them."""
    fleet.heal()
    report = await _check("--prefill", fleet.decodes[0].url, "--decode", fleet.prefills[0].url)
    assert any("kv_producer" in json.dumps(one) for one in report["findings"]), report["findings"]
