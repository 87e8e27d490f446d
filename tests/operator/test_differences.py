"""What is written: nothing where the live object has all that is wanted, however the server spells
it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdproxy_operator.differences import is_as_wanted, stamped
from pdproxy_operator.own import OwnObject

WANTED = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {
        "name": "a",
        "namespace": "llm",
        "labels": {"x": "y"},
        "ownerReferences": [{"apiVersion": "v", "kind": "K", "name": "n", "uid": "u"}],
    },
    "spec": {
        "replicas": 0,
        "template": {
            "spec": {
                "hostNetwork": False,
                "nodeSelector": {},
                "containers": [
                    {
                        "name": "engine",
                        "args": ["--model", "m"],
                        "env": [{"name": "A", "value": ""}, {"name": "B", "value": "1.0"}],
                        "ports": [{"containerPort": 1, "protocol": "TCP"}],
                        "resources": {"limits": {"cpu": "1500m", "memory": "2048Mi"}},
                    }
                ],
            }
        },
    },
}


def live(change: Callable[[dict[str, Any]], object] = lambda _: None) -> OwnObject:
    """The object as the server has it."""
    one = copy.deepcopy(stamped(WANTED))
    one["metadata"] |= {"uid": "1", "resourceVersion": "5", "generation": 2}
    spec = one["spec"]["template"]["spec"]
    spec |= {"dnsPolicy": "ClusterFirst"}
    del spec["hostNetwork"], spec["nodeSelector"]
    container = spec["containers"][0]
    del container["env"][0]["value"]
    container["env"].insert(0, {"name": "OF_OTHERS", "value": "1"})
    container["resources"]["limits"] = {"cpu": "1500m", "memory": "2Gi"}
    container["imagePullPolicy"] = "Always"
    spec["containers"].append({"name": "of-others"})
    one["spec"]["revisionHistoryLimit"] = 10
    one["status"] = {"replicas": 0}
    change({"": one, "spec": one["spec"], "container": container, "metadata": one["metadata"]})
    return msgspec.json.decode(msgspec.json.encode(one), type=OwnObject)


def test_nothing_is_written_for_what_the_server_or_others_have_added() -> None:
    assert is_as_wanted(live(), stamped(WANTED))
    assert stamped(WANTED) == stamped(copy.deepcopy(WANTED))


@pytest.mark.parametrize(
    "change",
    [
        lambda of: of["metadata"]["labels"].pop("x"),
        lambda of: of["metadata"]["ownerReferences"].clear(),
        lambda of: of["metadata"].pop("annotations"),
        lambda of: of["spec"].update(replicas=1),
        lambda of: of["container"]["args"].append("--more"),
        lambda of: of["container"]["env"].pop(),
        lambda of: of["container"]["env"][2].update(value="1"),
        lambda of: of["container"]["resources"]["limits"].update(cpu="2"),
        lambda of: of["container"].update(ports=[{"containerPort": 1, "protocol": "UDP"}]),
        lambda of: of["container"].update(name="other"),
    ],
)
def test_what_others_have_changed_is_written_again(change: Callable[..., object]) -> None:
    assert not is_as_wanted(live(change), stamped(WANTED))


def test_what_is_wanted_no_more_is_written() -> None:
    """Nothing says so but the annotation: the live object has all that is wanted now."""
    less = copy.deepcopy(WANTED)
    del less["metadata"]["labels"]  # type: ignore[attr-defined]
    assert not is_as_wanted(live(), stamped(less))
