"""compose.yaml by podman-compose: its services reach each other by their names, and serve."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.image.machine import Machine

pytestmark = pytest.mark.timeout(1800)

SIMULATED = ("prefill-0", "prefill-1", "decode-0", "decode-1", "proxy")
CHAT = {
    "model": "sim",
    "max_tokens": 20,
    "messages": [
        {"role": "user", "content": "Name three rivers, and the sea that each one reaches."}
    ],
}


def compose(machine: Machine, *words: str) -> str:
    """Run podman-compose in the checkout."""
    inside = 'cd /work/context && exec python3 -m podman_compose "$@"'
    return machine.run("bash", "-c", inside, "bash", *words).stdout


@pytest.fixture
def down(machine: Machine) -> Iterator[None]:
    """Whatever a test has started, it ends."""
    yield
    compose(machine, "--profile", "gpu", "down", "--timeout", "1", "--volumes")
    assert machine.podman("ps", "--all", "--quiet") == ""


def container(name: str) -> str:
    """The name of a service's container."""
    return f"pdproxy_{name}_1"


@pytest.mark.usefixtures("down")
def test_the_simulated_half(machine: Machine) -> None:
    """Two prefill engines, two decode engines, and the proxy on the loopback; then one of each role
    is killed.
    """
    compose(machine, "up", "--detach", "--no-build")
    machine.healthy(*map(container, SIMULATED))
    for name in SIMULATED:
        (found,) = json.loads(machine.podman("inspect", container(name)))
        assert found["HostConfig"]["ReadonlyRootfs"], name
        assert not found["EffectiveCaps"], name
        assert "no-new-privileges" in str(found["HostConfig"]["SecurityOpt"]), name
        assert found["Config"]["User"] == "10001:10001", name
        ports = [one[0]["HostIp"] for one in found["HostConfig"]["PortBindings"].values() if one]
        assert ports == (["127.0.0.1"] if name == "proxy" else []), name
    status, text = machine.ask("/ready")
    assert (status, json.loads(text)["state"]) == (200, "ok")
    status, text = machine.ask("/v1/chat/completions", CHAT)
    assert status == 200, text
    assert json.loads(text)["choices"][0]["message"]["content"]
    for name in ("prefill-0", "decode-1"):
        machine.podman("kill", container(name))
    answers = [machine.ask("/v1/chat/completions", CHAT)[0] for _ in range(10)]
    assert answers == [200] * 10
    started = time.monotonic()
    compose(machine, "down")
    print(
        f"\ncompose.yaml: five services, all of them stopped in {time.monotonic() - started:.1f} s"
    )


@pytest.mark.usefixtures("down")
def test_the_services_of_the_gpu_half_that_need_no_gpu(machine: Machine) -> None:
    """The proxy takes its settings, waits for its engines, and is alive; the owner of the engines'
    namespaces stays.
    """
    names = ("gpu-namespace", "gpu-proxy")
    compose(machine, "--profile", "gpu", "up", "--detach", "--no-build", "--no-deps", *names)
    machine.healthy(container("gpu-proxy"))
    assert machine.ask("/ready", port=8001)[0] == 503
    assert (
        machine.podman("inspect", "--format", "{{.State.Status}}", container(names[0])) == "running"
    )
