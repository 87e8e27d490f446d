"""What the failure of a leg means for its engine's breaker."""

from __future__ import annotations

import json

import pytest

from pdproxy.kit.errors import (
    AnswerBudgetError,
    AnswerTooLargeError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    Wait,
)
from pdproxy.scheduling.leases import Verdict
from pdproxy.serving.dispatch.failure_class import is_doubtful, verdict_of
from pdproxy_lab.sim.error_body import error_body
from pdproxy_lab.sim.request import EngineDeadError

DEAD = json.dumps(error_body(str(EngineDeadError()), "InternalServerError", 500)).encode()
QUOTED = json.dumps(
    error_body(f"The prompt was: {EngineDeadError()}", "InternalServerError", 500)
).encode()


@pytest.mark.parametrize(
    ("error", "streamed", "before"),
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
        (AnswerTooLargeError("x"), Verdict.NEUTRAL, Verdict.NEUTRAL),
    ],
)
def test_verdicts(error: EngineError, streamed: Verdict, before: Verdict) -> None:
    """Before its first data, an engine may answer 5xx because of the request, or of its KV: this
    shows nothing by itself.
    """
    assert verdict_of(error, streamed=True) is streamed
    assert verdict_of(error) is before
    assert is_doubtful(error) is (before is Verdict.NEUTRAL and streamed is Verdict.FAILED)
