"""`pdproxy conformance` on real engines of every connector that runs on a CPU, NIXL's own aside (the gate has that)."""

import json
from pathlib import Path

import pytest

from .connected import lmcache_settings
from .engine import Engine
from .fleet import Fleet
from .long_lmcache import Pushing, nursery, pushing
from .long_notifier import Pair, pair
from .test_conformance import _proven
from .test_shared import sharers

__all__ = ["nursery", "pair", "pushing", "sharers"]  # fixtures

pytestmark = [pytest.mark.engines, pytest.mark.timeout(500, func_only=True)]


def _not_passed(report: dict[str, object], verdicts: dict[str, str]) -> set[str]:
    """What doesn't apply; anything else that didn't pass fails the test with the whole report."""
    assert set(verdicts.values()) <= {"passed", "not_applicable"}, json.dumps(report, indent=1)
    return {name for name, verdict in verdicts.items() if verdict != "passed"}


async def test_the_notifier(pair: Pair) -> None:
    """NIXL with it: notices of each rank, and a wait that ends by them."""
    port = pair.address.rpartition(":")[2]
    told = ("--kv-notifier", "true", "--kv-ready-port", port)
    report, verdicts = await _proven("--prefill", pair.prefill.url, "--decode", pair.decode.url, *told)
    assert _not_passed(report, verdicts) <= {"notice_wait", "notice_missing"}


async def test_lmcache(pushing: Pushing, tmp_path: Path) -> None:
    """LMCache's PD mode: pushed, told, read."""
    config = tmp_path / "lmcache.yaml"
    config.write_text(json.dumps(lmcache_settings(pushing.fleet, pushing.ports)))
    report, verdicts = await _proven("--config", str(config), "--plain", pushing.fleet.plain.url)
    assert _not_passed(report, verdicts) <= {"release", "lease"}


async def test_shared(sharers: Fleet, plain: Engine) -> None:
    """Files between the engines."""
    engines = ("--prefill", sharers.prefills[0].url, "--decode", sharers.decodes[0].url, "--plain", plain.url)
    report, verdicts = await _proven(*engines, "--connector", "shared")
    notices = {"notice_each_rank", "notice_wait", "notice_missing"}
    assert _not_passed(report, verdicts) <= {"release", "lease", *notices}
