"""As many engines as the load needs, within the budget at each moment, and no back and forth."""

import itertools
import math
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_operator.resources import Autoscaling, ScalingState
from pdproxy_operator.scaling import Decision, Limited, Scaled, decide

LOOK_S = 15.0
DOWN_S = 600
NOON = 1_800_000_000.0
Demand = Callable[[float], Mapping[str, float | None]]
"""Of each role, by the seconds since the start."""


def runtime(name: str = "decode", demand: float | None = 2.0, replicas: int = 2, **more: object):
    """Return a runtime whose engines are all ready."""
    role = "prefill" if name.startswith("prefill") else "decode"
    values: dict[str, object] = {
        "runtime": name,
        "pool": "llama",
        "role": role,
        "autoscaling": Autoscaling(20, 1, DOWN_S),
        "replicas": replicas,
        "pods": replicas,
        "ready": replicas,
        "pending": 0,
        "pending_s": 0.0,
        "ending": 0,
        "gpus": 1,
        "demand": demand,
        "complete": True,
        "state": None,
    }
    return Scaled(**(values | more))  # type: ignore[arg-type]


class Cluster:
    """Runtimes in virtual time. An engine is ready `load_s` after it has a node, and ends
    `drain_s` after it should. `nodes`: GPUs that there are.
    """

    def __init__(
        self,
        *runtimes: Scaled,
        gpus: int | None = None,
        nodes: float = math.inf,
        load_s: float = 240.0,
        drain_s: float = 90.0,
    ) -> None:
        self.one = {one.runtime: one for one in runtimes}
        self.gpus, self.nodes, self.load_s, self.drain_s = gpus, nodes, load_s, drain_s
        self.now = NOON
        self.ready_at = {name: [NOON] * one.replicas for name, one in self.one.items()}
        self.pending: dict[str, list[float]] = {name: [] for name in self.one}
        self.gone_at: dict[str, list[float]] = {name: [] for name in self.one}
        self.changes: list[tuple[float, str, int]] = []
        self.most_held = 0
        self.decisions: dict[str, Decision] = {}

    def held(self, *, pending: bool = False) -> int:
        return sum(
            one.gpus
            * (
                len(self.ready_at[name])
                + len(self.gone_at[name])
                + (len(self.pending[name]) if pending else 0)
            )
            for name, one in self.one.items()
        )

    def look(self, **demands: float | None) -> None:
        """Let time pass, and have the replicas decided."""
        self.now += LOOK_S
        for name, one in self.one.items():
            self.gone_at[name] = [at for at in self.gone_at[name] if at > self.now]
            waiting = self.pending[name]
            while waiting and self.held() + one.gpus <= self.nodes:
                waiting.pop(0)
                self.ready_at[name].append(self.now + self.load_s)
            self.one[name] = one._replace(
                pods=len(self.ready_at[name]) + len(waiting),
                ready=sum(at <= self.now for at in self.ready_at[name]),
                pending=len(waiting),
                pending_s=self.now - waiting[0] if waiting else 0.0,
                ending=len(self.gone_at[name]),
                demand=demands.get(name.split("-")[0], one.demand),
            )
        self.decisions = decide(list(self.one.values()), self.gpus, self.now)
        for name, decision in self.decisions.items():
            self._scale(name, decision)
        self.most_held = max(self.most_held, self.held(pending=True))

    def _scale(self, name: str, decision: Decision) -> None:
        ready, waiting = self.ready_at[name], self.pending[name]
        if decision.replicas != self.one[name].replicas:
            self.changes.append((self.now - NOON, name, decision.replicas))
        while len(ready) + len(waiting) > decision.replicas:
            if waiting:
                waiting.pop()
            else:
                ready.sort()
                ready.pop()
                self.gone_at[name].append(self.now + self.drain_s)
        while len(ready) + len(waiting) < decision.replicas:
            waiting.append(self.now)
        self.one[name] = self.one[name]._replace(replicas=decision.replicas, state=decision.state)

    def run(self, minutes: float, demand: Demand) -> None:
        end = self.now + 60 * minutes
        while self.now < end:
            self.look(**demand(self.now - NOON))

    def replicas(self, name: str = "decode") -> int:
        return self.one[name].replicas

    def limited(self, name: str = "decode") -> Limited | None:
        return self.decisions[name].limited


def steady(**demands: float | None) -> Demand:
    """Return a demand that does not change."""
    return lambda _: demands


# -- up and down


def test_up_at_once_and_down_one_at_a_time() -> None:
    """A step up is answered by one look; a step down after ten minutes, an engine a minute."""
    cluster = Cluster(runtime())
    cluster.look(decode=5.3)
    assert cluster.replicas() == 6
    cluster.run(20, steady(decode=5.3))
    cluster.changes.clear()
    cluster.run(30, steady(decode=2.0))
    (first, _, _), *_ = cluster.changes
    assert first == pytest.approx(15 + 20 * 60 + 15 + DOWN_S, abs=2 * LOOK_S)
    assert [replicas for _, _, replicas in cluster.changes] == [5, 4, 3, 2]
    times = [at for at, _, _ in cluster.changes]
    assert all(after - before >= 60 for before, after in itertools.pairwise(times))


def test_no_fewer_than_were_enough_all_the_time() -> None:
    """One peak within the ten minutes keeps as many engines as it needs."""
    cluster = Cluster(runtime(replicas=8))
    cluster.run(40, lambda now: {"decode": 5.5 if 290 < now < 310 else 3.0})
    assert [replicas for _, _, replicas in cluster.changes][:2] == [7, 6]
    assert cluster.replicas() == 3
    assert cluster.changes[2][0] > 2 * DOWN_S


def test_a_jump_is_bounded() -> None:
    """A demand of a million asks for four more, or for twice as many, until these are ready."""
    cluster = Cluster(runtime(autoscaling=Autoscaling(1000, 1, DOWN_S)))
    cluster.run(3, steady(decode=1e6))
    assert cluster.replicas() == 6
    assert cluster.limited() == Limited(
        "ScaleUpLimit",
        "The load needs 952381 engines: no more than 6 are asked for while 2 can serve.",
    )
    cluster.run(3, steady(decode=1e6))
    assert cluster.replicas() == 12


def test_bounds_of_the_runtime() -> None:
    """The number stays between its bounds, and goes there also where the demand is not known."""
    scaling = Autoscaling(max_replicas=3, min_replicas=2, scale_down_seconds=DOWN_S)
    cluster = Cluster(runtime(autoscaling=scaling, replicas=1))
    cluster.look(decode=None)
    assert cluster.replicas() == 2
    cluster.look(decode=4.4)
    assert cluster.replicas() == 3
    assert cluster.limited() == Limited(
        "MaxReplicas", "The load needs 5 engines: maxReplicas is 3."
    )
    cluster.run(60, steady(decode=0.0))
    assert cluster.replicas() == 2
    below = Cluster(runtime(autoscaling=Autoscaling(20, 10, DOWN_S), ready=0, replicas=1))
    below.ready_at["decode"] = []
    below.look(decode=12.0)
    assert below.replicas() == 10
    assert below.limited() == Limited(
        "ScaleUpLimit",
        "The load needs 12 engines: no more than 10 are asked for while 0 can serve.",
    )
    above = Cluster(runtime(autoscaling=scaling, replicas=5))
    above.run(2, steady(decode=5.0))
    assert above.replicas() == 3


@pytest.mark.parametrize("level", [1.0, 3.05, 4.5, 7.95, 20.0])
def test_no_back_and_forth_under_a_constant_load(level: float) -> None:
    """Eight hours of a load with noise of 5 percent change the number a few times."""
    chance = Random(level)
    noise = 0.0

    def demand(_: float) -> dict[str, float | None]:
        nonlocal noise
        noise = 0.8 * noise + 0.6 * chance.gauss(0, 0.05)
        return {"decode": level * (1 + noise)}

    cluster = Cluster(runtime(replicas=math.ceil(level), autoscaling=Autoscaling(90, 1, DOWN_S)))
    cluster.run(480, demand)
    assert len(cluster.changes) <= 2 * 8
    assert cluster.replicas() >= level


# -- what is not known


@pytest.mark.parametrize("demand", [None, math.nan, math.inf, -1.0])
def test_an_unknown_demand_changes_nothing(demand: float | None) -> None:
    """Not even after an hour; then fewer must be enough for the whole time again."""
    cluster = Cluster(runtime(replicas=5))
    cluster.run(8, steady(decode=2.0))
    cluster.run(60, steady(decode=demand))
    assert cluster.changes == []
    assert cluster.limited() == Limited(
        "DemandUnknown",
        "No proxy says how many engines the load needs: their number is not changed.",
    )
    cluster.run(9, steady(decode=2.0))
    assert cluster.changes == []
    cluster.run(2, steady(decode=2.0))
    assert len(cluster.changes) == 1


def test_a_page_that_is_missing_is_no_lower_load() -> None:
    """The sum of the other pages adds engines; it takes none away."""
    cluster = Cluster(runtime(replicas=5))
    cluster.one["decode"] = cluster.one["decode"]._replace(complete=False)
    cluster.run(60, steady(decode=2.0))
    assert cluster.changes == []
    limited = cluster.limited()
    assert limited is not None
    assert limited.reason == "ProxiesMissing"
    cluster.look(decode=6.5)
    assert cluster.replicas() == 7


def test_single_looks_without_a_page_do_not_begin_the_time_again() -> None:
    """Otherwise one page in ten minutes would keep all engines for ever."""
    cluster = Cluster(runtime(replicas=3))
    for number in range(4 * 11):
        cluster.one["decode"] = cluster.one["decode"]._replace(complete=number % 7 != 3)
        cluster.look(decode=1.5)
    assert cluster.replicas() == 2


def test_a_look_right_behind_another_has_nothing_to_write() -> None:
    """Each write has the runtime looked at again: else there would be no end of writes."""
    first = decide([runtime(replicas=3)], None, 1000.0)["decode"]
    looks = [runtime(replicas=3)._replace(state=first.state)]
    assert decide(looks, None, 1004.0)["decode"] == first
    assert decide(looks, None, 1015.0)["decode"] != first


def test_a_clock_that_goes_back() -> None:
    """No time counts that is in the future."""
    cluster = Cluster(runtime(replicas=4))
    cluster.run(9, steady(decode=1.5))
    cluster.now -= 3 * 3600
    cluster.run(9, steady(decode=1.5))
    assert cluster.changes == []
    cluster.run(2, steady(decode=1.5))
    assert cluster.replicas() == 3
    cluster.now -= 3 * 3600
    cluster.run(12, steady(decode=1.5))
    assert cluster.replicas() == 2


def test_what_is_remembered_may_be_anything() -> None:
    """A user can write the status."""
    never, later = "+99999-01-01T00:00:00Z", "2999-01-01T00:00:00Z"
    for state in (
        ScalingState(math.nan, -3, "yesterday", never, later),
        ScalingState(1.0, 1, later, written(0), never),
    ):
        cluster = Cluster(runtime(replicas=3, state=state))
        cluster.run(9, steady(decode=1.5))
        assert cluster.changes == []
        cluster.run(3, steady(decode=1.5))
        assert cluster.replicas() == 2


# -- engines that can't be had


def test_pending_for_ever() -> None:
    """No more is asked for, prefill engines go all the same, and what is not needed is given
    back.
    """
    cluster = Cluster(runtime("prefill", 4.0, 4), runtime("decode", 2.0, 2), nodes=7)
    cluster.run(4, steady(prefill=4.0, decode=4.0))
    assert cluster.replicas("decode") == 4
    cluster.run(116, lambda now: {"prefill": 1.9, "decode": 6.0 + now / 3600})
    assert cluster.replicas("prefill") == 2
    assert cluster.limited("prefill") is None
    assert cluster.replicas("decode") == 6
    assert (cluster.one["decode"].ready, cluster.one["decode"].pending) == (5, 1)
    stuck = Cluster(runtime("decode", 2.0, 2), nodes=3)
    stuck.run(120, lambda now: {"decode": 4.0 + now / 3600})
    assert stuck.replicas() == 4
    assert stuck.limited() == Limited(
        "EnginesPending",
        "1 engine can't be scheduled, for 120 minutes now: no more are asked for.",
    )
    stuck.run(10.5, steady(decode=2.0))
    assert stuck.replicas() == 2
    assert stuck.limited() is None


# -- the budget


def test_gpus_that_change_their_runtime_are_freed_first() -> None:
    """The decode engines rise as the prefill engines' pods are gone, and never above the budget."""
    cluster = Cluster(runtime("prefill", 6.0, 6), runtime("decode", 4.0, 4), gpus=10, drain_s=200)
    cluster.run(9, steady(prefill=3.0, decode=7.0))
    assert cluster.replicas("decode") == 4
    assert cluster.limited("decode") == Limited(
        "GpusInUse",
        "3 engines must wait until others have ended: they hold GPUs of the 10 of the budget.",
    )
    cluster.run(16, steady(prefill=3.0, decode=7.0))
    assert (cluster.replicas("prefill"), cluster.replicas("decode")) == (3, 7)
    assert cluster.most_held == 10
    downs = [at for at, name, _ in cluster.changes if name == "prefill"]
    ups = [at for at, name, _ in cluster.changes if name == "decode"]
    assert [up - down for down, up in zip(downs, ups, strict=True)] == [210.0] * 3


def test_the_budget_goes_where_the_smallest_part_is() -> None:
    """Twice the load that the budget can serve: both roles get half of what they need."""
    cluster = Cluster(runtime("prefill", 2.0, 2), runtime("decode", 2.0, 2), gpus=9)
    cluster.run(30, steady(prefill=12.0, decode=6.0))
    assert (cluster.replicas("prefill"), cluster.replicas("decode")) == (6, 3)
    assert cluster.limited("prefill") == Limited(
        "Budget", "The load needs 12 engines: the budget of 9 GPUs has room for 6."
    )
    cluster.run(60, steady(prefill=6.0, decode=12.0))
    assert (cluster.replicas("prefill"), cluster.replicas("decode")) == (3, 6)
    assert cluster.most_held == 9


def test_a_budget_that_is_too_small_is_not_moved_to_and_fro() -> None:
    """Two roles that need the same, each a little more in turn."""
    cluster = Cluster(runtime("prefill", 5.0, 5), runtime("decode", 4.0, 4), gpus=9)
    more, less = {"prefill": 6.1, "decode": 6.0}, {"prefill": 6.0, "decode": 6.1}
    cluster.run(240, lambda now: more if now % 2400 < 1200 else less)
    assert cluster.changes == []


def test_least_numbers_go_before_needs() -> None:
    """A runtime keeps its least number, however much more the other needs."""
    cluster = Cluster(
        runtime("prefill", 3.0, 3, autoscaling=Autoscaling(20, 3, DOWN_S)), runtime(), gpus=6
    )
    cluster.run(60, steady(prefill=3.0, decode=40.0))
    assert (cluster.replicas("prefill"), cluster.replicas("decode")) == (3, 3)


def test_pods_that_are_not_made_yet_hold_gpus() -> None:
    """Two looks within a second ask for no more than the budget has."""
    fleet = [runtime("prefill", 2.0, 2), runtime("decode", 4.0, 2)]
    assert decide(fleet, 5, NOON)["decode"].replicas == 3
    fleet = [fleet[0]._replace(demand=6.0), fleet[1]._replace(demand=3.0, replicas=3)]
    assert [one.replicas for one in decide(fleet, 5, NOON).values()] == [2, 3]


def test_a_decode_bound_load_never_raises_prefill() -> None:
    """Not even with free GPUs, and not when the decode engines can't be had."""
    cluster = Cluster(
        runtime("prefill", 2.0, 2), runtime("decode", 3.0, 3), gpus=12, nodes=8, drain_s=20
    )
    cluster.run(180, lambda now: {"prefill": 1.8, "decode": 3.0 + now / 600})
    assert cluster.replicas("decode") > 6
    assert all(replicas < 2 for _, name, replicas in cluster.changes if name == "prefill")


def test_a_budget_that_was_made_smaller() -> None:
    """Engines go at once, one a minute, by the same rule."""
    cluster = Cluster(runtime("prefill", 6.0, 6), runtime("decode", 6.0, 6), gpus=8)
    cluster.run(4, steady(prefill=6.0, decode=6.0))
    assert (cluster.replicas("prefill"), cluster.replicas("decode")) == (4, 4)


def test_engines_of_several_gpus() -> None:
    """An engine of four GPUs waits for four, and does not keep one from an engine of one."""
    cluster = Cluster(
        runtime("prefill", 1.0, 1), runtime("decode", 1.0, 1, gpus=4), gpus=8, load_s=30
    )
    cluster.run(5, steady(prefill=4.0, decode=2.0))
    assert (cluster.replicas("prefill"), cluster.replicas("decode")) == (4, 1)


def test_engines_without_gpus_are_in_no_budget() -> None:
    """Simulated ones rise also where the budget is exceeded."""
    twice = Autoscaling(max_replicas=20, min_replicas=2, scale_down_seconds=DOWN_S)
    cluster = Cluster(runtime("prefill", gpus=0), runtime(autoscaling=twice), gpus=1)
    cluster.look(prefill=5.0, decode=2.0)
    assert cluster.replicas("prefill") == 5


def test_runtimes_of_one_role_share_its_demand() -> None:
    """What engines of a fixed number serve is not asked for again."""
    fixed = runtime("decode-fixed", replicas=3, autoscaling=None)
    cluster = Cluster(fixed, runtime("decode-a", replicas=1), runtime("decode-b", replicas=1))
    cluster.run(10, steady(decode=6.9))
    assert [cluster.replicas(name) for name in cluster.one] == [3, 2, 2]
    assert cluster.decisions["decode-fixed"] == Decision(3, None)


# -- anything

counts = st.integers(0, 12)
demands = st.one_of(st.none(), st.floats(allow_nan=True), st.floats(0, 30))


@st.composite
def scaled(draw: st.DrawFn, name: str) -> Scaled:
    least, most = draw(counts), draw(counts)
    pods = draw(counts)
    ready = draw(st.integers(0, pods))
    pending = draw(st.integers(0, pods - ready))
    times = st.one_of(st.none(), st.integers(-2000, 500).map(written))
    return runtime(
        name,
        draw(demands),
        draw(counts),
        autoscaling=draw(st.sampled_from([None, Autoscaling(most, least, DOWN_S)])),
        pods=pods,
        ready=ready,
        pending=pending,
        pending_s=draw(st.sampled_from([0.0, 299.0, 301.0])) if pending else 0.0,
        ending=draw(counts),
        gpus=draw(st.integers(0, 4)),
        complete=draw(st.booleans()),
        state=draw(
            st.one_of(
                st.none(),
                st.builds(ScalingState, demands, st.none() | counts, times, times, times),
            )
        ),
    )


def written(seconds: int) -> str:
    state = decide([runtime()], None, NOON + seconds)["decode"].state
    assert state is not None
    assert state.seen_at is not None
    return state.seen_at


@given(scaled("prefill"), scaled("decode"), st.none() | st.integers(0, 40))
def test_what_holds_for_all(prefill: Scaled, decode: Scaled, gpus: int | None) -> None:
    """Bounds, one at a time, the budget, and nothing without a known demand."""
    fleet = [prefill, decode]
    decided = decide(fleet, gpus, NOON)
    held = sum(one.held * one.gpus for one in fleet)
    over = gpus is not None and sum(one.replicas * one.gpus for one in fleet) > gpus
    for one in fleet:
        decision = decided[one.runtime]
        if one.autoscaling is None:
            assert decision == Decision(one.replicas, None)
            continue
        least = one.autoscaling.min_replicas
        most = max(one.autoscaling.max_replicas, least)
        assert decision.replicas <= max(most, one.replicas)
        assert decision.replicas >= min(least, one.replicas)
        assert decision.replicas >= one.replicas - (one.pending if one.stuck else 1)
        known = one.demand is not None and math.isfinite(one.demand) and one.demand >= 0
        if not known and least <= one.replicas <= most and not over:
            assert decision.replicas == one.replicas
        if not one.complete and one.replicas <= most and not over:
            assert decision.replicas >= one.replicas
        if known and decision.replicas > max(one.replicas, least):
            assert decision.replicas < one.demand + 1  # type: ignore[operator]
        if known and decision.limited is None and not over:
            assert decision.replicas * 1.05 + 1e-6 >= one.demand  # type: ignore[operator]
    if gpus is not None:
        after = sum(
            one._replace(replicas=decided[one.runtime].replicas).held * one.gpus
            for one in fleet
            if decided[one.runtime].replicas > one.replicas
        ) + sum(
            one.held * one.gpus for one in fleet if decided[one.runtime].replicas <= one.replicas
        )
        assert after <= max(gpus, held)
    again = decide(
        [
            one._replace(replicas=decided[one.runtime].replicas, state=decided[one.runtime].state)
            for one in fleet
        ],
        gpus,
        NOON,
    )
    for one in fleet:
        before, after = decided[one.runtime].replicas, again[one.runtime].replicas
        assert after >= before or one.stuck  # a second look at once takes none away


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6),
    st.integers(2, 14),
    st.integers(1, 3),
)
def test_never_above_the_budget(
    levels: list[tuple[float, float]], gpus: int, decode_gpus: int
) -> None:
    """Whatever the demand does, at any load and drain time."""
    cluster = Cluster(
        runtime("prefill", 1.0, 1),
        runtime("decode", 1.0, 1, gpus=decode_gpus),
        gpus=max(gpus, 1 + decode_gpus),
        drain_s=130,
    )
    for prefill, decode in levels:
        cluster.run(11, steady(prefill=prefill, decode=decode))
    assert cluster.gpus is not None
    assert cluster.most_held <= cluster.gpus
