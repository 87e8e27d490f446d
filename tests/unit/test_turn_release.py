"""How many releases of kept turns wait at once."""

from __future__ import annotations

from typing import Any, cast

from pdproxy.deciding.turn_release import AT_ONCE, LEAST_WAITING, TurnReleases
from pdproxy.observe.events import Observers, TurnReleased
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.kept_turn import TurnRecord
from pdproxy.transfer.turns import DecodeHandle, TurnRules, read
from tests.fakes.recorder import Recorder
from tests.unit.test_kept_turns import params


async def test_as_many_wait_as_turns_may_be_kept() -> None:
    """An orderly stop releases all that is kept; what is more than that is left to the engine's own
    time.
    """
    for max_kept, most in ((3000, 3000), (10, LEAST_WAITING)):
        seen = Recorder()
        releases = TurnReleases(
            TurnRules(),
            cast("Any", None),
            {},
            Deadlines(),
            Observers([seen]),
            lambda: 0.0,
            max_kept,
        )
        handle = read(params(20, "a"))
        assert isinstance(handle, DecodeHandle)
        record = TurnRecord("d", 1, "p", 2, "a", "tiny", (), None, 0)
        for _ in range(most + 5):  # none of them runs before the loop goes on
            releases.release(record, handle)
        assert seen.events == [TurnReleased("left")] * 5
        assert releases.pending == most + AT_ONCE
        assert await releases.settle(10) == 0
        assert seen.events == [TurnReleased("left")] * 5 + [TurnReleased("released")] * most
