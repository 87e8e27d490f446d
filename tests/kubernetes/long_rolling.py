"""Engines in pods that are replaced by others, added, taken away and lost while clients stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.build import ensure
from tests.kubernetes.fleet import (
    BOTH,
    CLIENTS,
    MEMBERS,
    NODES,
    UP,
    fleet,
    streaming,
)
from tests.kubernetes.kubelet import ready_condition

OWN_METRICS_ALONE = {"PDPROXY_SERVICES": " ", "KV_SECONDS": "0"}
"""Variables of a hook that asks no proxy."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variables", [None, OWN_METRICS_ALONE], ids=["no hook", "own metrics"])
async def test_prefill_engines_that_ask_no_proxy_take_kv_with_them(
    variables: dict[str, str] | None, tmp_path: Path
) -> None:
    """A prefill engine has no requests any more, but decode engines still read its KV."""
    slow: Any = {"transfer-latency-s": "2"}
    async with fleet(tmp_path, hook=variables is not None, variables=variables, **slow) as made:
        async with streaming(made, CLIENTS):
            made.change("prefill", hook=variables is not None, variables=variables, **slow)
            await made.settled()
        print(f"prefill engines, {variables}: {dict(made.seen)}")
        assert set(made.seen) > {"right"}, made.seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", BOTH)
async def test_replacing_one_role_costs_nothing(role: str, tmp_path: Path) -> None:
    """With slow reads, too."""
    slow: Any = {"transfer-latency-s": "2"}
    async with fleet(tmp_path, **slow) as made:
        async with streaming(made, CLIENTS):
            made.change(role, **slow)
            await made.settled()
        print(f"{role} engines: {dict(made.seen)}")
        assert set(made.seen) == {"right"}, made.seen
        assert await made.unread() == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_real", [False, True], ids=["fake API server", "real API server"])
async def test_another_version_pairs_with_its_own_alone(is_real: bool, tmp_path: Path) -> None:
    """While both versions serve: no prompt is moved from one to the other, and none fails."""
    built = await asyncio.to_thread(ensure) if is_real else None
    async with fleet(tmp_path, built=built, version="0.32.0") as made:
        async with streaming(made, CLIENTS):
            made.change(*BOTH, version="0.33.0")
            await made.settled()
        print(f"another version: {dict(made.seen)}")
        assert set(made.seen) == {"right"}, made.seen
        assert await made.unread() == 0


@pytest.mark.timeout(300)
async def test_more_engines_and_fewer(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        async with streaming(made, CLIENTS):
            for replicas in (3, 1, 2):
                made.prefill.replicas = made.decode.replicas = replicas
                await made.settled()
        print(f"3, 1 and 2 engines of each role: {dict(made.seen)}")
        assert set(made.seen) == {"right"}, made.seen
        assert await made.unread() == 0


SOON = {
    "deadlines": {"prefill": 3, "first_token": 3, "between_tokens": 3, "unacknowledged": 3},
    "limits": {"retry_share": 1},
}
"""The proxies' settings where half of all requests lose their engine at once."""


@pytest.mark.timeout(300)
async def test_a_machine_that_goes_silent(tmp_path: Path) -> None:
    """Its pods stay, and the API does not say that they are gone: the proxies' probes do, and other
    engines go on with its streams. Later the pods' objects are deleted by force, and others take
    their places.
    """
    async with fleet(tmp_path, settings=SOON) as made:
        silent = made.kubelets[NODES[1]]
        async with streaming(made, CLIENTS):
            await made.until(lambda: made.served(CLIENTS))
            silent.go_silent()
            gone = [pod for pod in await made.pods.list() if pod["spec"]["nodeName"] == silent.node]
            for pod in gone:
                status = {**pod["status"], "conditions": [ready_condition(None)]}
                await made.pods.set_status(pod, status)
            await made.until(lambda: made.all_have(UP, 2))
            served = made.seen["right"]
            await made.until(lambda: made.served(served + 2 * CLIENTS))
            assert await made.all_have(MEMBERS, 4)
            for one in (made.prefill, made.decode):
                one.nodes = NODES[:1]
            for pod in gone:
                await made.pods.remove(pod)
            await made.settled()
        print(f"a silent machine: {dict(made.seen)}")
        assert set(made.seen) == {"right"}, made.seen
        assert await made.of_proxies("pdproxy_continuations_total", result="continued") > 0
