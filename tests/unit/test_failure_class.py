"""What the failure of a leg means for its engine's breaker."""

from __future__ import annotations

import json

import pytest

from pdproxy.kit.errors import (
    AnswerBudgetError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    Wait,
)
from pdproxy.scheduling.leases import Verdict
from pdproxy.serving.dispatch.failure_class import verdict_of
from pdproxy_lab.sim.error_body import error_body
from pdproxy_lab.sim.request import EngineDeadError

DEAD = json.dumps(error_body(str(EngineDeadError()), "InternalServerError", 500)).encode()
QUOTED = json.dumps(error_body(f"The prompt was: {EngineDeadError()}", "InternalServerError", 500)).encode()


@pytest.mark.parametrize(
    ("error", "without_kv", "with_kv"),
    [
        (EngineRefusedError("x", status=500, body=b""), Verdict.FAILED, Verdict.NEUTRAL),
        (EngineRefusedError("x", status=502, body=b""), Verdict.FAILED, Verdict.NEUTRAL),
        (EngineRefusedError("x", status=503, body=b""), Verdict.NEUTRAL, Verdict.NEUTRAL),
        (EngineRefusedError("x", status=429, body=b""), Verdict.NEUTRAL, Verdict.NEUTRAL),
        (EngineError("x"), Verdict.FAILED, Verdict.FAILED),
        (EngineRefusedError("x", status=500, body=DEAD), Verdict.DEAD, Verdict.DEAD),
        (EngineRefusedError("x", status=503, body=DEAD), Verdict.DEAD, Verdict.DEAD),
        (EngineRefusedError("x", status=500, body=QUOTED), Verdict.FAILED, Verdict.NEUTRAL),
        (EngineRefusedError("x", status=400, body=DEAD), Verdict.NEUTRAL, Verdict.NEUTRAL),
        (EngineRefusedError("x", status=500, body=DEAD[:-1]), Verdict.FAILED, Verdict.NEUTRAL),
        (EngineTimeoutError("x", wait=Wait.FIRST_TOKEN), Verdict.FAILED, Verdict.FAILED),
        (EngineUnreachableError("x"), Verdict.UNREACHABLE, Verdict.UNREACHABLE),
        (AnswerBudgetError("x"), Verdict.NEUTRAL, Verdict.NEUTRAL),
    ],
)
def test_verdicts(error: EngineError, without_kv: Verdict, with_kv: Verdict) -> None:
    """A decode engine that got KV may answer 5xx because its prefill engine is gone: this does not count against it."""
    assert verdict_of(error) is without_kv
    assert verdict_of(error, with_kv=True) is with_kv
