"""Engines that push, in virtual time: the legs of a prompt."""

from __future__ import annotations

from typing import Any

from pdproxy_lab.sim.facts import SimFacts
from tests.sim.engines import OTHER, PREFILL, PROMPT, plain

LEASE = 30


def facts(role: Any, **more: Any) -> SimFacts:
    return SimFacts(role=role, connector="nixl-push", **more)


def promise(p, **changed):
    """What D is sent while P computes: P's coordinates."""
    number = p.core.connector._port
    promised = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": p.core.engine_id,
        "remote_host": "127.0.0.1",
        "remote_port": number,
        "remote_request_id": "made up",
        "tp_size": p.facts.tensor_parallel_size,
        "pp_size": 1,
    }
    return {key: value for key, value in (promised | changed).items() if value is not ...}


def prefill(engines, p, name, prompt=PROMPT, suffix="aaaaaaaa", **sampling):
    return engines.ask(p, prompt, 1, dict(PREFILL), id=f"cmpl-{name}-0-{suffix}", **sampling)


def decode(engines, p, d, name, prompt=PROMPT, suffix="bbbbbbbb", kv=None, **sampling):
    return engines.ask(
        d, prompt, 8, promise(p) if kv is None else kv, id=f"cmpl-{name}-0-{suffix}", **sampling
    )


def wait(engines, seconds=1.0):
    engines.run(engines.now + seconds)


def free(engine):
    return (
        engine.core.pool.usage == 0
        and not engine.core.connector.held
        and not engine.core.connector.expected
    )


def meet(engines, p, d):
    """Move KV once: both have met."""
    prefill(engines, p, "met", OTHER)
    run = decode(engines, p, d, "met", OTHER)
    wait(engines, 3)
    assert run.tokens == plain(OTHER)
