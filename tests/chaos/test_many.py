"""The sum of many seeds: findings and slow seeds fail it."""

from __future__ import annotations

import pytest

from tests.chaos import many
from tests.chaos.course import Result
from tests.chaos.finding import Finding
from tests.chaos.options import Options
from tests.chaos.setup import CONNECTORS, unsuitable

FINE = Result([], "digest", {"right": 5, "error event 502": 1}, {"kill": 2}, cpu=2.0)


@pytest.mark.parametrize(
    ("second", "code", "said"),
    [
        (
            FINE,
            0,
            "2 seeds, 0 with findings; 12 requests under 4 faults: 10 right, 2 error event 502\n",
        ),
        (
            Result([Finding("a rule", "text")], cpu=1.0),
            1,
            "  a rule: text\n  repeat it: python -m tests.chaos --seed 7",
        ),
        (
            Result([], cpu=11.0),
            1,
            "CPU seconds of a seed: 6.5 on average, 11.0 at most; 1 took more than 10\n",
        ),
        (Result([], calls={"right": 4}), 1, "seeds with fewer than 5 right answers: 1\n"),
    ],
)
def test_seeds_are_summed_up(
    second: Result, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert many.summed([(Options(seed=6), FINE), (Options(seed=7), second)], 10.0) == code
    assert said in capsys.readouterr().out


def test_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[Options], int]] = []

    def run_each(runs: list[Options], jobs: int) -> list[tuple[Options, Result]]:
        asked.append((runs, jobs))
        return [(runs[0], FINE)]

    monkeypatch.setattr(many, "run_each", run_each)
    assert many.main(["--first", "50", "--seconds", "9", "--jobs", "3"]) == 0
    runs, jobs = asked[0]
    assert jobs == 3
    assert [(one.seed, one.seconds, one.faults) for one in runs] == [
        (seed, 9.0, 1.5) for seed in range(50, 100)
    ]
    kinds = {(one.connector, one.notices) for one in runs[:6]}
    assert kinds == {
        ("nixl", "none"),
        ("nixl", "notifier"),
        ("nixl", "early"),
        ("nixl-push", "none"),
        ("mooncake", "none"),
    }
    assert all(unsuitable(one) is None for one in runs)
    assert many.main(["--others", "--seconds", "9", "--faults", "3"]) == 0
    others, _ = asked[1]
    assert kinds.isdisjoint(
        seen := {
            (one.connector, one.notices)
            for one in others
            if one.pool != "any" and not one.encode and one.workers == 1
        }
    )
    assert {connector for connector, _ in kinds | seen} == set(CONNECTORS)
    assert {one.pool for one in others} == {"roles", "any"}
    assert any(one.encode for one in others)
    assert any(one.workers > 1 for one in others)
    assert {one.workers for one in runs} == {1}
    assert many.main(["--workers", "2"]) == 0
    assert {one.workers for one in asked[2][0]} == {2}
    assert all(
        unsuitable(one) is None and (one.seconds, one.faults) == (9.0, 3.0) for one in others
    )
