"""The status of an engine's error event: its code where that is a status of an error, and 500 for
anything else.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.kit.errors import EngineRefusedError
from pdproxy.serving.stream.failures import failure_in


@pytest.mark.parametrize(
    ("code", "status"),
    [(400, 400), (599, 599), (399, 500), (600, 500), ("503", 500), (None, 500), (404, 404)],
)
def test_which_status_an_error_event_has(code: Any, status: int) -> None:
    line = (
        b"data: "
        + json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": code}}).encode()
    )
    error = failure_in(line + b"\n\n", [line])
    assert isinstance(error, EngineRefusedError)
    assert error.status == status
