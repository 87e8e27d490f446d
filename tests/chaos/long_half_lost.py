"""Half of a thousand streams lose their engine at once, and each goes on (as `test_half_lost`, of
fewer).
"""

# Takes a minute, so `.ci/full` runs it only.

from __future__ import annotations

import pytest

from tests.chaos.test_half_lost import half_lost


@pytest.mark.timeout(600)
def test_half_of_a_thousand_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    half_lost(1000, monkeypatch)
