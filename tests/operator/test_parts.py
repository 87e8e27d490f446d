"""Which engines serve, and why the others do not, as Kubernetes and the proxies say it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdproxy_operator.figures import EngineFigures, Figures
from pdproxy_operator.own import OwnPod
from pdproxy_operator.parts import parts_of
from pdproxy_operator.pools import selected_pools
from pdproxy_operator.rollout import Part, Wanted, duration, next_step
from pdproxy_operator.troubles import ready_for, trouble_of
from tests.operator.pods import NOW, ago, ended, pod, waiting, workload
from tests.operator.resources import proxy, runtime

LOADS = {"started": False}
FAILS = {"restartCount": 3, "lastState": ended(1, "a line of its log\nno GPU.\n")}
TROUBLES: list[tuple[OwnPod, str, str, bool, bool]] = [
    (
        pod("p-1", scheduled="0/5 nodes are available: 5 Insufficient nvidia.com/gpu."),
        "Unschedulable",
        "has no node: 0/5 nodes are available: 5 Insufficient nvidia.com/gpu",
        True,
        False,
    ),
    (
        pod("p-1", container=waiting("ErrImagePull", "vllm:typo: not found")),
        "ImagePull",
        "cannot pull its image: vllm:typo: not found",
        True,
        False,
    ),
    (
        pod(
            "p-1",
            container=waiting(
                "ImagePullBackOff",
                'Back-off pulling image "vllm:typo": ErrImagePull: vllm:typo: not found',
            ),
        ),
        "ImagePull",
        "cannot pull its image: vllm:typo: not found",
        True,
        False,
    ),
    (
        pod("p-1", container=waiting("CreateContainerConfigError", 'secret "x" not found')),
        "CannotStart",
        'cannot start its container engine: secret "x" not found',
        True,
        False,
    ),
    (
        pod("p-1", container=waiting("CrashLoopBackOff", "back-off 5m0s", **FAILS)),
        "CrashLoop",
        "has ended 3 times, the last time with exit code 1: no GPU",
        True,
        False,
    ),
    (
        pod("p-1", container={**LOADS, **FAILS}),
        "CrashLoop",
        "has ended 3 times, the last time with exit code 1: no GPU",
        True,
        False,
    ),
    (
        pod(
            "p-1", container={**LOADS, "restartCount": 1, "lastState": ended(137, "", "OOMKilled")}
        ),
        "Restarted",
        "has ended once, the last time with exit code 137: OOMKilled",
        True,
        False,
    ),
    (pod("p-1", container=LOADS), "Loading", "loads its model", False, False),
    (
        pod("p-1", container=waiting("ContainerCreating")),
        "Creating",
        "is being created",
        False,
        False,
    ),
    (
        pod("p-1", container={"started": True, **FAILS}),
        "NotReady",
        "does not answer its readiness probe",
        True,
        True,
    ),
]


@pytest.mark.parametrize(("one", "reason", "clause", "is_fault", "started"), TROUBLES)
def test_why_a_pod_does_not_serve(
    one: OwnPod, reason: str, clause: str, is_fault: bool, started: bool
) -> None:
    found = trouble_of(one, NOW)
    assert found == (reason, f"p-1 {clause}", 3600, is_fault, started)


def test_a_pod_that_is_ready_has_no_trouble() -> None:
    assert trouble_of(pod("p-1", ready=True, container=FAILS), NOW) is None


def test_a_condition_may_come_without_its_time() -> None:
    one = pod("p-1", ready=True)
    condition = (one.status.conditions or [])[0]
    bare = msgspec.structs.replace(condition, since=None)
    status = msgspec.structs.replace(one.status, conditions=[bare])
    found = ready_for(msgspec.structs.replace(one, status=status), NOW)
    assert duration(found) == "24 h"


def parts(workloads: list[Any], pods: list[OwnPod], figures: Figures | None = None) -> list[Part]:
    (pool,) = selected_pools(proxy(), [runtime("p", "prefill"), runtime("d", "decode")])
    of = {"new": pool.revision}
    some = [
        workload(name, of.get(revision, revision), *more) for name, revision, *more in workloads
    ]
    return [
        part._replace(revision="new") if part.revision == pool.revision else part
        for part in parts_of(pool, some, pods, figures, NOW)
    ]


def test_engines_are_counted_by_runtime_and_revision() -> None:
    """Pods that end, that have ended, of others, or behind the first of a group do not count."""
    worker = {"leaderworkerset.sigs.k8s.io/worker-index": "1"}
    pods = [
        pod("p-1", ready=True, revision="old"),
        pod("p-2", ready=True, revision="old", deletionTimestamp=ago(5)),
        pod("p-3", ready=True, revision="old", labels=worker),
        pod("p-4", since=90, container=LOADS, revision="old"),
        pod("p-5", since=100, container={"started": True}, revision="old"),
        pod("x-1", ready=True, revision="old"),
    ]
    assert parts([("p", "old", 4), ("d", "new", 1), ("x", "old", 1)], pods) == [
        Part(
            *("p", "prefill", "old", 4, 1, "p-5 does not answer its readiness probe", 100.0),
            unstarted=2,  # one loads, one is not there yet
        ),
        Part("d", "decode", "new", 1, 0, None, 0.0, 1),
    ]


def test_an_engine_of_which_its_controller_says_that_it_serves_has_served() -> None:
    """The pods may be known later than their Deployment: such an engine is not ended at once."""
    (pool,) = selected_pools(proxy(), [runtime("p", "prefill")])
    for ready, unstarted in ((0, 3), (2, 1), (3, 0), (9, 0)):
        (part,) = parts_of(pool, [workload("p", "old", 3, readyReplicas=ready)], [], None, NOW)
        assert (part.ready, part.unstarted) == (0, unstarted)


def test_pods_that_are_not_created() -> None:
    failure = {
        "type": "ReplicaFailure",
        "status": "True",
        "message": "exceeded quota: gpus",
        "lastTransitionTime": ago(60),
    }
    (pool,) = selected_pools(proxy(), [runtime("p", "prefill")])
    (part,) = parts_of(pool, [workload("p", "r", 2, conditions=[failure])], [], None, NOW)
    assert part == Part(
        "p", "prefill", "r", 2, 0, "p-r can create no pod: exceeded quota: gpus", 60.0, 2
    )


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        (None, None),
        (Figures(total=2), None),
        (Figures(2, 2, engines={"p-1": EngineFigures("m", "prefill", 2, 2)}), None),
        (Figures(2, 2), "is not known to 2 of 2 proxies"),
        (
            Figures(3, 2, engines={"p-1": EngineFigures("m", "prefill", 1, 1)}),
            "is not known to 1 of 2 proxies",
        ),
        (
            Figures(2, 2, engines={"p-1": EngineFigures("m", "prefill", 2, 1)}),
            "is not up for 1 of 2 proxies",
        ),
        (
            Figures(2, 2, engines={"p-1": EngineFigures("m", "prefill", 2, 2, fails=1)}),
            "is used without its KV, which does not move, by 1 of 2 proxies",
        ),
    ],
)
def test_a_new_engine_serves_once_all_proxies_use_it(
    figures: Figures | None, why: str | None
) -> None:
    """An old one that is ready always counts: it may still have requests."""
    (pool,) = selected_pools(proxy(), [runtime("p", "prefill")])
    pods = [pod("p-1", ready=True, since=100, revision=pool.revision)]
    (part,) = parts_of(pool, [workload("p", pool.revision, 1)], pods, figures, NOW)
    waits = None if why is None else f"p-1 {why}"
    assert part == Part(
        *("p", "prefill", pool.revision, 1, int(why is None), waits), 0.0 if why is None else 100.0
    )
    pods = [pod("p-1", ready=True, since=100, revision="old")]
    (part,) = parts_of(pool, [workload("p", "old", 1)], pods, figures, NOW)
    assert part.ready == 1


def test_a_deployment_of_any_number_of_replicas_takes_no_time() -> None:
    """Somebody has scaled it by hand, or has mistyped a number."""
    (part,) = parts([("p", "new", 2**31 - 1)], [])
    step = next_step([part], [Wanted("p", "prefill", 1)], "new", "pairs", 60.0)
    assert step.replicas == {("p", "new"): 1}
