"""How long handoffs take is learned, by the length of the prompt."""

from __future__ import annotations

from itertools import count

import pytest

from pdproxy.engine_model.profile import load
from pdproxy.scheduling.auto.auto import Auto
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.placements import auto, bounds_of
from pdproxy_lab.simulate.shape import Fleet, Shape
from tests.simulate.test_auto import B

H200 = load("h200-8b").hardware


class LateHandoffs(Cluster):
    """Engines whose handoffs take so many seconds longer than the profile says, by the length of
    the prompt.
    """

    def __init__(self, late: dict[int, float]) -> None:
        self.late = late
        self.ratios: dict[int, list[float]] = {tokens: [] for tokens in late}
        """Of splits: the measured TTFT by the predicted one."""
        shapes = dict.fromkeys(Role, Shape(max_num_batched_tokens=4096, kv_tokens=496_000))
        super().__init__(Fleet(prefill=2, decode=2), H200, shapes, {}, auto(bounds_of(B)))
        placement = self.ledger.placement
        assert isinstance(placement, Auto)
        self.placement, self._began = placement, placement.began
        placement.began = self._watched  # type: ignore[method-assign]

    def _decode(self, call: Call, now: float) -> None:
        assert call.prefill_lease is not None
        call.ledger.close(call.prefill_lease, Verdict.GOOD, now)
        self._at(now + self.late[call.prompt], self._late_decode, call)

    def _late_decode(self, call: Call, now: float) -> None:
        ledger = call.ledger
        close, ledger.close = ledger.close, lambda *_: False  # type: ignore[method-assign]
        super()._decode(call, now)
        ledger.close = close  # type: ignore[method-assign]

    def _watched(self, lease: Lease, now: float) -> None:
        _, leg = self.placement._legs[lease]
        if leg.handoff is not None:
            self.ratios[leg.tokens].append((now - leg.opened_at) / leg.ttft_s)
        self._began(lease, now)


def handoff_s(tokens: int) -> float:
    """Return about what the profile says of a handoff at an engine with some sequences."""
    pull = 0.3 * H200.further_pull_s + tokens * H200.pull_token_s
    steps = 1.5 * H200.step_s(0, 8, 8 * 4000)
    return H200.between_engines_s + pull + H200.transfer_s(tokens) + steps + H200.to_client_s


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_late_handoffs_are_expected_after_some_fifty_splits(times: float) -> None:
    """Handoffs of long prompts are late; those of short ones are as the profile says."""
    lengths = 900, 4000, 12_000
    late = {tokens: (times - 1.0) * handoff_s(tokens) for tokens in lengths[1:]} | {900: 0.0}
    made, numbers = LateHandoffs(late), count()
    made.run(
        Call(number, number / 13.0, tokens, 128)
        for _ in range(200)
        for tokens in (lengths[0], lengths[1], lengths[1], lengths[2])
        for number in [next(numbers)]
    )
    for tokens, ratios in made.ratios.items():
        assert len(ratios) > 60, (tokens, len(ratios))
        later = ratios[50:]
        assert sum(later) / len(later) == pytest.approx(1.0, abs=0.1), tokens
