"""The conditions say how a runtime and a PDProxy are, in sentences with names and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdproxy_operator.conditions import proxy_conditions, runtime_conditions
from pdproxy_operator.figures import EngineFigures, Figures
from pdproxy_operator.own import OwnPod
from pdproxy_operator.pools import selected_pools
from pdproxy_operator.resources import ConditionOf, Runtime
from pdproxy_operator.rollout import Part, Step
from pdproxy_operator.scaling import Decision, Limited
from tests.operator.pods import NOW, ago, ended, pod, waiting
from tests.operator.resources import proxy, runtime

POOL = "Qwen-Qwen3-0.6B-nixl"
P, D = runtime("p", "prefill", replicas=3), runtime("d", "decode", replicas=2)
OTHER = runtime("other", "decode", connector="mooncake")
WHOLE = runtime("w", "aggregated")
REVISION = selected_pools(proxy(), [P, D])[0].revision
P1, P2, P3 = (pod(f"p-{n}", ready=True, revision=REVISION) for n in (1, 2, 3))
LOADS = pod("p-3", container={"started": False}, revision=REVISION)
IMAGE = pod("p-3", container=waiting("ErrImagePull", "not found"), revision=REVISION)
CRASHES = pod(
    "p-2",
    container=waiting("CrashLoopBackOff", restartCount=4, lastState=ended(1, "no GPU")),
    revision=REVISION,
)
FULL = "p-3 has no node: 5 Insufficient nvidia.com/gpu"
PENDING = pod("p-3", scheduled="5 Insufficient nvidia.com/gpu", revision=REVISION)
DONE = Step({("p", REVISION): 3, ("d", REVISION): 2}, None, stuck=False)
WAITS = Step({("p", "old"): 1}, "p-3 loads its model, for 3 min", stuck=False)
STUCK = Step({("p", "old"): 1}, f"{FULL}, for 31 min", stuck=True)
QUOTA = "p-new can create no pod: exceeded quota: gpus"


def part(ready: int, replicas: int, revision: str = REVISION, waits: str | None = None) -> Part:
    return Part("p", "prefill", revision, replicas, ready, waits)


def says(total: int = 2, answered: int = 2, **more: Any) -> Figures:
    """What proxies say of p-1, p-2, p-3 and d-1, all well. `more`: other fields, and `d_1`, `p_3`
    of engines.
    """
    engines = {f"p-{n}": EngineFigures(POOL, "prefill", answered, answered) for n in (1, 2, 3)} | {
        "d-1": EngineFigures(POOL, "decode", answered, answered)
    }
    for name in ("d-1", "p-2", "p-3"):
        if (change := more.pop(name.replace("-", "_"), None)) is not None:
            for key, value in change.items():
                setattr(engines[name], key, value)
    return Figures(total, answered, **{"engines": engines, "splits": {POOL: (2, 2)}, **more})


@dataclass
class Case:
    """A runtime and what there is of it."""

    runtime: Runtime = P
    runtimes: Sequence[Runtime] = (P, D)
    selected_by: Sequence[str] = ("x",)
    parts: Sequence[Part] = (part(3, 3),)
    pods: Sequence[OwnPod] = (P1, P2, P3)
    figures: Figures | None = field(default_factory=says)
    step: Step = DONE
    decision: Decision | None = None
    refused: str | None = None

    def look(self, now: float = NOW, before: Sequence[ConditionOf] = ()) -> list[ConditionOf]:
        pools = selected_pools(proxy(), self.runtimes)
        return runtime_conditions(
            self.runtime,
            next(one for one in pools if self.runtime in one.runtimes),
            pools=pools,
            selected_by=self.selected_by,
            parts=self.parts,
            pods=self.pods,
            figures=self.figures,
            step=self.step,
            decision=self.decision,
            refused=self.refused,
            now=now,
            before=before,
        )


AUTO = {"autoscaling": {"minReplicas": 1, "maxReplicas": 4, "scaleDownSeconds": 600}}
NEEDS = (
    "Prefill engines need a runtime of role decode with model Qwen/Qwen3-0.6B and connector nixl"
)
WHY = "Have they a --kv-transfer-config for their role, and can their partners reach them?"
READY = "GET /ready of a proxy says why."
ROWS: list[tuple[str, str, str, str, Case]] = [
    # Available
    ("Available", "True", "EnginesReady", "3 of 3 engines are ready.", Case()),
    ("Available", "True", "EnginesReady", "1 of 3 engines is ready.", Case(pods=[P1, LOADS])),
    (
        *("Available", "False", "NoEngineReady"),
        "None of 3 engines is ready: p-3 cannot pull its image: not found.",
        Case(pods=[LOADS, IMAGE]),
    ),
    (
        *("Available", "False", "NoEngineReady", f"None of 3 engines is ready: {QUOTA}."),
        Case(pods=[], parts=[part(0, 3, waits=QUOTA)]),
    ),
    ("Available", "False", "NoEngineReady", "None of 3 engines is ready.", Case(pods=[], parts=[])),
    (
        *("Available", "False", "NoReplicas", "replicas is 0: there are no engines."),
        Case(runtime("p", "prefill", replicas=0), [runtime("p", "prefill", replicas=0)], pods=[]),
    ),
    # Progressing
    ("Progressing", "False", "UpToDate", "3 of 3 engines are ready, and of one revision.", Case()),
    (
        *("Progressing", "True", "RollingOut"),
        f"1 of 3 engines is of revision {REVISION}; it waits: p-3 loads its model, for 3 min.",
        Case(step=WAITS, parts=[part(1, 2), part(1, 1, "old")]),
    ),
    (
        *("Progressing", "True", "RollingOut", f"2 of 3 engines are of revision {REVISION}."),
        Case(parts=[part(2, 2), part(1, 1, "old")]),
    ),
    (
        *("Progressing", "False", "Stuck"),
        (
            f"0 of 3 engines are of revision {REVISION}, and no other one is replaced; it "
            f"waits: {FULL}, for 31 min."
        ),
        Case(step=STUCK, parts=[part(0, 1), part(2, 2, "old")]),
    ),
    (
        *("Progressing", "True", "RollingOut"),
        (
            f"0 of 1 engine is of revision {REVISION}; it waits: p-3 loads its model, for 3 min. "
            "The new one starts beside the only one, and needs GPUs of its own."
        ),
        Case(
            only := runtime("p", "prefill"),
            [only, D],
            pods=[P1, PENDING],
            parts=[part(0, 1), part(1, 1, "old")],
            step=WAITS,
        ),
    ),
    (
        *("Progressing", "True", "Starting"),
        "2 of 3 engines are ready; it waits: p-3 loads its model, for 3 min.",
        Case(step=WAITS, pods=[P1, P2, LOADS]),
    ),
    (
        *("Progressing", "False", "Stuck", f"2 of 3 engines are ready: {FULL}, for 31 min."),
        Case(step=STUCK, pods=[P1, P2, PENDING]),
    ),
    (
        "Progressing",
        "False",
        "UpToDate",
        "3 of 3 engines are ready, and of one revision.",
        Case(step=STUCK),
    ),  # another runtime is
    (
        *("Progressing", "True", "ScalingDown", "3 engines are ready, and 2 are to stay."),
        Case(fewer := runtime("p", "prefill", replicas=2), [fewer, D]),
    ),
    # Degraded
    ("Degraded", "False", "AsExpected", "Nothing is wrong.", Case()),
    ("Degraded", "False", "AsExpected", "Nothing is wrong.", Case(pods=[P1, P2, LOADS])),
    (
        *("Degraded", "True", "ImagePull"),
        "p-3 cannot pull its image: not found. In all, 2 engines have a fault.",
        Case(pods=[P1, CRASHES, IMAGE]),
    ),
    (
        *("Degraded", "True", "CrashLoop"),
        "p-2 has ended 4 times, the last time with exit code 1: no GPU.",
        Case(pods=[P1, CRASHES, P3]),
    ),
    ("Degraded", "True", "Unschedulable", f"{FULL}.", Case(pods=[P1, P2, PENDING])),
    (
        *("Degraded", "True", "TooFewPods", f"{QUOTA}."),
        Case(pods=[P1], parts=[part(1, 3, waits=QUOTA)]),
    ),
    ("Degraded", "True", "Refused", "spec.template: no.", Case(refused="spec.template: no")),
    (
        *("Degraded", "True", "NoPartner", f"{NEEDS}, and the PDProxy selects none."),
        Case(runtimes=[P, WHOLE]),
    ),
    (
        *("Degraded", "True", "ConnectorsDiffer", f"{NEEDS}: other has connector mooncake."),
        Case(runtimes=[P, OTHER]),
    ),
    ("Degraded", "False", "AsExpected", "Nothing is wrong.", Case(runtimes=[P], selected_by=())),
    (
        *("Degraded", "True", "SeveralProxies"),
        "The PDProxies a, b and x select it: a decides when its engines are replaced.",
        Case(selected_by=["a", "b", "x"]),
    ),
    # Discovered
    ("Discovered", "True", "AllDiscovered", "Proxies know all engines that are ready.", Case()),
    (
        *("Discovered", "True", "AllDiscovered"),
        "Proxies know all engines that are ready. 1 of 3 proxies gave no answer.",
        Case(figures=says(3, 2)),
    ),
    (
        *("Discovered", "False", "NotDiscovered", "p-3 is not known to 2 of 3 proxies."),
        Case(figures=says(3, 3, p_3={"known": 1, "up": 1})),
    ),
    (
        *("Discovered", "False", "NotDiscovered"),
        "p-1 and 2 more are not known to 2 of 2 proxies.",
        Case(figures=Figures(2, 2)),
    ),
    (
        *("Discovered", "True", "AllDiscovered", "Proxies know all engines that are ready."),
        Case(pods=[pod("p-9", ready=True, since=10)]),
    ),
    (
        *("Discovered", "False", "NotReached"),
        "No proxy finds p-3 up, though Kubernetes does.",
        Case(figures=says(p_3={"up": 0})),
    ),
    ("Discovered", "Unknown", "NoEngineReady", "No engine is ready yet.", Case(pods=[LOADS])),
    (
        *("Discovered", "Unknown", "NotSelected"),
        "No PDProxy selects it, so that no proxy says it.",
        Case(selected_by=(), figures=None),
    ),
    ("Discovered", "Unknown", "NoAnswer", "No proxy is ready.", Case(figures=None)),
    (
        *("Discovered", "Unknown", "NoAnswer"),
        "No proxy has answered the operator at /metrics.",
        Case(figures=Figures(2)),
    ),
    (
        *("Discovered", "Unknown", "NoAnswer", "/metrics of x-1 has no lines."),
        Case(figures=Figures(2, unreadable=["/metrics of x-1 has no lines"])),
    ),
    # KVTransferring
    (
        *("KVTransferring", "True", "Moving", "The KV of prompts arrives at decode engines."),
        Case(figures=says(d_1={"recomputed": 0.01})),
    ),
    (
        *("KVTransferring", "Unknown", "NoTraffic", "No prompt was split in the last 5 minutes."),
        Case(),
    ),
    (
        *("KVTransferring", "False", "NotMoving"),
        f"KV does not move from p-2 and 1 more: no prompt is split there. {WHY}",
        Case(figures=says(p_2={"fails": 1}, p_3={"fails": 2}, d_1={"recomputed": 0.0})),
    ),
    (
        *("KVTransferring", "False", "Recomputing"),
        (
            "More than 90 % of the prompt tokens whose KV was sent to d-1 were computed again "
            "there in about the last minute."
        ),
        Case(D, pods=[pod("d-1", ready=True)], figures=says(d_1={"recomputed": 1.0, "fails": 2})),
    ),
    (
        *("KVTransferring", "False", "Recomputing"),
        (
            "More than 5 % of the prompt tokens whose KV was sent to d-1 were computed again "
            "there in about the last minute."
        ),
        Case(figures=says(d_1={"recomputed": 0.06})),
    ),
    (
        *("KVTransferring", "False", "NotSplit"),
        "No proxy can pair a prefill engine with a decode engine: no prompt is split. " + READY,
        Case(figures=says(splits={POOL: (0, 2)})),
    ),
    (
        *("KVTransferring", "Unknown", "NoPartner", f"No decode engine of pool {POOL} is up."),
        Case(figures=says(d_1={"up": 0}, splits={POOL: (0, 2)})),
    ),
    (
        *("KVTransferring", "Unknown", "NotSelected"),
        "No PDProxy selects it, so that no proxy says it.",
        Case(selected_by=(), figures=None),
    ),
    (
        *("KVTransferring", "Unknown", "NotUsed", "Engines of role aggregated exchange no KV."),
        Case(WHOLE, [WHOLE]),
    ),
    # ScalingLimited
    (
        *("ScalingLimited", "False", "NotAutoscaled"),
        "autoscaling is not set: replicas says how many engines.",
        Case(),
    ),
    (
        *("ScalingLimited", "False", "AsNeeded", "It has as many engines as its load needs."),
        Case(auto := runtime("p", "prefill", **AUTO), [auto, D], decision=Decision(3, None)),
    ),
    (
        *("ScalingLimited", "True", "MaxReplicas", "maxReplicas is 4, and 6 are needed."),
        Case(
            decision=Decision(4, None, Limited("MaxReplicas", "maxReplicas is 4, and 6 are needed"))
        ),
    ),
]


@pytest.mark.parametrize(("kind", "status", "reason", "message", "case"), ROWS)
def test_a_runtime(kind: str, status: str, reason: str, message: str, case: Case) -> None:
    found = {one.type: one for one in case.look()}
    one = found[kind]
    assert (one.status, one.reason, one.message) == (status, reason, message)


@dataclass
class Front:
    """A PDProxy and what there is of it."""

    runtimes: Sequence[Runtime] = (P, D)
    pods: Sequence[OwnPod] = (pod("x-1", ready=True), pod("x-2", ready=True))
    figures: Figures | None = field(default_factory=says)
    steps: Sequence[Step] = (DONE,)
    refused: str | None = None
    shared: Sequence[str] = ()

    def look(self) -> list[ConditionOf]:
        return proxy_conditions(
            proxy(),
            pools=selected_pools(proxy(), self.runtimes),
            pods=self.pods,
            figures=self.figures,
            steps=self.steps,
            refused=self.refused,
            shared=self.shared,
            now=NOW,
            before=(),
        )


WRONG = pod(
    "x-2", container=waiting("CrashLoopBackOff", restartCount=2, lastState=ended(2, "limits.x: no"))
)
FRONTS: list[tuple[str, str, str, str, Front]] = [
    ("Available", "True", "ProxiesReady", "2 of 2 proxies are ready.", Front()),
    (
        *("Available", "False", "NoProxyReady", "None of 2 proxies is ready: x-1 starts."),
        Front(pods=[pod("x-1", container={"started": False})]),
    ),
    ("Available", "False", "NoProxyReady", "None of 2 proxies is ready.", Front(pods=[])),
    (
        *("Available", "False", "CrashLoop"),
        (
            "None of 2 proxies is ready: x-2 has ended 2 times, the last time with exit code 2: "
            "limits.x: no."
        ),
        Front(pods=[WRONG]),
    ),
    (
        *("PairsComplete", "True", "PairsComplete"),
        f"Pool {POOL} has the engines that its requests need.",
        Front(),
    ),
    (
        *("PairsComplete", "True", "PairsComplete"),
        (
            f"Pool {POOL} has the engines that its requests need. 2 pods with the engines' labels "
            f"are not used. {READY}"
        ),
        Front(figures=says(left_out=2)),
    ),
    (
        *("PairsComplete", "False", "NothingSelected", "No PDRuntime has the labels model=qwen."),
        Front([]),
    ),
    (
        *("PairsComplete", "False", "NoPartner"),
        f"Pool {POOL} has a runtime of role decode, and none of role prefill.",
        Front([D, WHOLE]),
    ),
    (
        *("PairsComplete", "False", "NoPair"),
        f"1 of 2 proxies can split no prompt of pool {POOL}. {READY}",
        Front(figures=says(splits={POOL: (1, 2)})),
    ),
    (
        *("PairsComplete", "False", "NoEngine", f"Pool {POOL} has no engine that is up."),
        Front(figures=Figures(2, 2)),
    ),
    ("PairsComplete", "Unknown", "NoAnswer", "No proxy is ready.", Front(figures=None)),
    ("ConfigAccepted", "True", "Accepted", "The settings are in force.", Front()),
    ("ConfigAccepted", "False", "Refused", "limits.x: no.", Front(refused="limits.x: no")),
    ("ConfigAccepted", "False", "Refused", "x-2 has ended: limits.x: no.", Front(pods=[WRONG])),
    (
        *("ConfigAccepted", "False", "NotInForce"),
        (
            "The settings could not be used by x-1 and 1 more: the former ones are in force. The "
            "log says why."
        ),
        Front(figures=says(refused=["x-1", "x-2"])),
    ),
    ("ConfigAccepted", "Unknown", "NoAnswer", "No proxy is ready.", Front(figures=None)),
    (
        *("Progressing", "False", "UpToDate"),
        "2 of 2 proxies are ready, and no engine is to be replaced.",
        Front(),
    ),
    (
        "Progressing",
        "True",
        "Starting",
        "1 of 2 proxies is ready.",
        Front(pods=[pod("x-1", ready=True)]),
    ),
    (
        *("Progressing", "True", "RollingOut"),
        "1 engine is to be replaced; it waits: p-3 loads its model, for 3 min.",
        Front(steps=[WAITS]),
    ),
    (
        *("Progressing", "True", "EnginesStarting"),
        "Engines start; it waits: p-3 loads its model, for 3 min.",
        Front(steps=[WAITS._replace(replicas={})]),
    ),
    (
        *("Progressing", "False", "Stuck"),
        (
            f"No engine is replaced: {FULL}, for 31 min. Another PDProxy decides when the engines "
            "of d are replaced."
        ),
        Front(steps=[DONE, STUCK], shared=["d"]),
    ),
]


@pytest.mark.parametrize(("kind", "status", "reason", "message", "front"), FRONTS)
def test_a_pdproxy(kind: str, status: str, reason: str, message: str, front: Front) -> None:
    found = {one.type: one for one in front.look()}
    one = found[kind]
    assert (one.status, one.reason, one.message) == (status, reason, message)


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "conditions.md"


@pytest.mark.parametrize("about", ["PDRuntime", "PDProxy"])
def test_the_reference_has_each_reason(about: str) -> None:
    """In the row of its condition and status, but for those that several conditions share."""
    _, _, rest = PAGE.read_text().partition(f"## {about}")
    rows: dict[tuple[str, str], str] = {}
    kind = ""
    for line in rest.partition("## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3:
            kind = cells[1] or kind
            key = kind, cells[2].partition(" ")[0]
            rows[key] = rows.get(key, "") + cells[2]
    shared = {"NotSelected", "NoAnswer", "CrashLoop"}
    for kind, status, reason, *_ in ROWS if about == "PDRuntime" else FRONTS:
        if reason not in shared or kind == "Degraded":
            assert f"`{reason}`" in rows[kind, status]
        else:
            assert f"`{reason}`" in PAGE.read_text()


def test_the_time_of_a_condition_changes_with_its_status_alone() -> None:
    """And what is the same is not written: it equals what the status has."""
    first = Case().look()
    assert {one.since for one in first} == {ago(0)}
    later = Case().look(NOW + 50, first)
    assert later == first
    changed = Case(pods=[P1, LOADS]).look(NOW + 100, later)
    assert {one.type: one.since == ago(-100) for one in changed} == {
        "Available": False,
        "Progressing": True,
        "Degraded": False,
        "Discovered": False,
        "KVTransferring": False,
        "ScalingLimited": False,
    }


def test_no_message_is_long() -> None:
    """What the API server, a kubelet or an engine says is cut."""
    long = pod("p-3", scheduled="x" * 100_000)
    case = Case(pods=[long], refused="y" * 100_000, selected_by=["z" * 253] * 100)
    assert max(len(one.message) for one in case.look()) < 1100
