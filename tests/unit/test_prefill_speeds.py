"""How long prefill engines take for a token: which of a prompt's tokens they have computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.deciding.turns import PrefillSpeeds
from pdproxy.serving.dispatch.turn import TurnBefore
from pdproxy.transfer.contract import Handle


@pytest.mark.parametrize(("created", "seconds"), [(None, 0.2), (0, 0.0), (20, 1.0)])
def test_tokens_of_the_prefix_cache_are_not_computed(created: int | None, seconds: float) -> None:
    """Unless the engine does not say how many these are. A leg of 100 tokens has taken 2 s."""
    speeds, times = PrefillSpeeds(), iter((5.0, 7.0))
    scheduler = cast("Any", SimpleNamespace(prefilled=speeds.measured))
    TurnBefore(scheduler, cast("Any", 1), None, lambda: next(times)).prefilled(
        Handle(b"{}", None, 100, "a", created_cache_tokens=created)
    )
    assert speeds.seconds(1, 10) == pytest.approx(seconds)
