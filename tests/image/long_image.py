"""The images of the Dockerfile: what is in them, and that they serve as user 10001 with a file
system that can't be written and without any rights.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pdproxy.tokens.tokenizer import load
from tests.image.machine import CAREFUL, FOLDER, TARGETS, Machine, base
from tests.tokens.models import folder

pytestmark = pytest.mark.timeout(1800)

MOST = {"local": 300, "tokenizer": 530}
"""Megabytes of each image's layers, uncompressed: the base (here a stand-in of 122) and 160 or
379.
"""
CHAT = {
    "model": "sim",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "Name three rivers."}],
}


@pytest.fixture(params=TARGETS)
def image(request: pytest.FixtureRequest) -> str:
    """The name of an image."""
    return f"localhost/pdproxy:{request.param}"


@pytest.fixture
def network(machine: Machine) -> Iterator[str]:
    """A network for containers, which end with it."""
    machine.podman("network", "create", "tests")
    yield "tests"
    machine.podman("rm", "--force", "--all", "--time", "1")
    machine.podman("network", "rm", "tests")


def inspected(machine: Machine, image: str) -> dict[str, Any]:
    """What podman knows of an image."""
    (found,) = json.loads(machine.podman("image", "inspect", image))
    return dict(found)


def test_an_image_is_small(machine: Machine, image: str) -> None:
    size, below = (inspected(machine, one)["Size"] / 1e6 for one in (image, base()))
    print(f"\n{image}: {size:.0f} MB, of which {size - below:.0f} MB above the base")
    assert size < MOST[image.partition(":")[2]]


def test_an_image_says_how_it_runs(machine: Machine, image: str) -> None:
    """As a user that Kubernetes can see is not root; and its variables are these alone."""
    config = inspected(machine, image)["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["pdproxy"]
    assert config["Cmd"] == ["serve"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["ExposedPorts"] == {"8000/tcp": {}}
    assert "Volumes" not in config
    names = {one.partition("=")[0] for one in config["Env"]}
    assert names == {"PATH", "LANG", "PYTHONUNBUFFERED", "PDPROXY_LISTEN__HOST"}
    assert inspected(machine, image)["Healthcheck"]["Test"][:3] == ["CMD", "/bin/bash", "-c"]


def test_an_image_has_nothing_that_it_should_not_have(machine: Machine, image: str) -> None:
    whole, below = (machine.podman("image", "mount", one) for one in (image, base()))
    scan = "/work/context/tests/image/scan.py"
    found = machine.run("python3", scan, whole, below).stdout.split("\n")
    assert found == ["", ""], "\n".join(found[:50])


def test_every_command_and_module_is_complete(machine: Machine, image: str) -> None:
    """Also without the packages that the smaller image does not have."""
    code = (
        "import importlib, pkgutil, subprocess, sys\n"
        "from pdproxy.cli.commands import COMMANDS\n"
        "for name in ('pdproxy', 'pdproxy_lab', 'pdproxy_operator'):\n"
        "    package = importlib.import_module(name)\n"
        "    for one in pkgutil.walk_packages(package.__path__, name + '.'):\n"
        "        if one.name.endswith('__main__') or '.scripts.' in one.name:\n"
        "            continue\n"
        "        try: importlib.import_module(one.name)\n"
        "        except ModuleNotFoundError as e:\n"
        "            if e.name.partition('.')[0] != 'vllm': raise\n"  # it is for engines
        "for name in COMMANDS:\n"
        "    subprocess.run(['pdproxy', name, '--help'], check=True, stdout=subprocess.DEVNULL)\n"
        "print(len(sys.modules))"
    )
    options = ("run", "--rm", "--network", "none", *CAREFUL, "--entrypoint", "python", image, "-c")
    assert int(machine.podman(*options, code)) > 500


def test_the_first_request(machine: Machine, image: str, network: str) -> None:
    """One prefill engine, one decode engine and the proxy, each in a container without rights."""
    on = ("--network", network)
    for role in ("prefill", "decode"):
        words = ("sim", "--role", role, "--host", "0.0.0.0", "--side-channel-host", role)
        machine.start(role, image, *words, "--port", "8000", options=on)
    serve = ("serve", "--prefill", "prefill:8000", "--decode", "decode:8000")
    machine.start("proxy", image, *serve, options=(*on, "--publish", "127.0.0.1:8000:8000"))
    machine.healthy("prefill", "decode", "proxy")
    status, answer = machine.ask("/v1/chat/completions", CHAT)
    assert status == 200, answer
    assert json.loads(answer)["choices"][0]["message"]["content"]
    for role in ("prefill", "decode"):
        code = (
            "import urllib.request as u\n"
            "print(u.urlopen('http://localhost:8000/metrics').read().decode())"
        )
        metrics = machine.podman("exec", role, "python", "-c", code)
        assert re.search(r"^vllm:prompt_tokens_total\{.*\} [1-9]", metrics, re.MULTILINE), role
    assert machine.podman("exec", "proxy", "id", "-u") == "10001"
    script = (
        'for at in / /tmp /run /var/tmp /run/lock /dev /opt/pdproxy "$HOME"; do\n'
        '  touch "$at/x" 2>&1 && echo "wrote $at"\n'
        "done\n"
        "grep CapEff: /proc/self/status"
    )
    said = machine.podman("exec", "proxy", "bash", "-c", script, check=False)
    assert "wrote" not in said, said
    assert said.endswith("\t0000000000000000")
    started = time.monotonic()
    machine.podman("stop", "--time", "60", "proxy")
    print(f"\n{image}: an idle proxy stops in {time.monotonic() - started:.1f} s")
    assert machine.podman("inspect", "--format", "{{.State.ExitCode}}", "proxy") == "0"


def test_the_smaller_image_says_which_one_tokenizes(machine: Machine) -> None:
    words = ("serve", "--tokenize", "always", "--decode", "127.0.0.1:1")
    run = ("podman", "run", "--rm", "--network", "none", *CAREFUL, "localhost/pdproxy:local")
    done = machine.run(*run, *words, check=False)
    assert done.returncode == 2
    assert "--target tokenizer" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_larger_image_tokenizes(machine: Machine, network: str) -> None:
    """With a model's folder that is mounted, and as the tests' own environment does."""
    path = folder(FOLDER / "model")
    code = (
        "from pdproxy.tokens.tokenizer import load\n"
        "print(load('/model').completion('hello world', add_special_tokens=True).json.decode())"
    )
    at = f"/work/{path.relative_to(FOLDER)}:/model:ro"
    options = (
        "run",
        "--rm",
        "--network",
        network,
        *CAREFUL,
        "--volume",
        at,
        "--entrypoint",
        "python",
    )
    ids = machine.podman(*options, "localhost/pdproxy:tokenizer", "-c", code)
    here = load(str(path)).completion("hello world", add_special_tokens=True)
    assert ids == here.json.decode()
