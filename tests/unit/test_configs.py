"""The files for operators agree with the program: `configs/`, `compose.yaml` and the Dockerfile."""

# The tests use no Docker: they read the files, and pass their command lines to the real parsers.

import asyncio
import configparser
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from pdproxy.app.drain import longest_drain
from pdproxy.app.server import files_needed
from pdproxy.cli import serve
from pdproxy.cli.commands import parser_for
from pdproxy.cli.main import main
from pdproxy.cli.options import settings_from
from pdproxy.settings.load import load
from pdproxy.settings.schema import Settings
from pdproxy_lab.cli import sim
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from pdproxy_lab.up.own_process import GRACE

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PROXIES = {"proxy": "", "gpu-proxy": "gpu-"}
"""Each proxy, with the prefix of its engines' names."""
VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+):-(?P<default>[^}]*)\})")


@pytest.fixture(autouse=True)
def _no_pdproxy_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PDPROXY_")]:
        monkeypatch.delenv(name)


# -- reading the files


class Instruction(NamedTuple):
    name: str
    rest: str


def dockerfile() -> list[Instruction]:
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def stages() -> dict[str, list[Instruction]]:
    """The instructions of each stage, behind those of the stage that it begins with. The last stage
    has no name.
    """
    found: dict[str, list[Instruction]] = {}
    for one in dockerfile():
        if one.name == "FROM":
            base, _, name = one.rest.partition(" AS ")
            found[name] = list(found.get(base, ()))
        found[name].append(one)
    return found


def the(name: str) -> str:
    (found,) = [one.rest for one in stages()[""] if one.name == name]
    return found


def image_environment() -> dict[str, str]:
    """Return the variables that the image sets, without PATH."""
    return {
        name: value
        for name, _, value in (word.partition("=") for word in the("ENV").split())
        if name != "PATH"
    }


def interpolated(value: Any) -> Any:
    """Interpolate as Compose does if no variable is set. A `$` of another form is an error."""
    if isinstance(value, dict):
        return {key: interpolated(one) for key, one in value.items()}
    if isinstance(value, list):
        return [interpolated(one) for one in value]
    if isinstance(value, str):
        assert "$" not in VARIABLE.sub("", value), value
        return VARIABLE.sub(lambda match: match["default"] if match["name"] else "$", value)
    return value


def compose() -> dict[str, Any]:
    tree: dict[str, Any] = interpolated(yaml.safe_load((ROOT / "compose.yaml").read_text()))
    return tree


SERVICES: dict[str, dict[str, Any]] = compose()["services"]
OURS = {name: one for name, one in SERVICES.items() if "build" in one and "entrypoint" not in one}
SIMS = {name: one for name, one in OURS.items() if one["command"].startswith("sim ")}
VLLMS = {name: one for name, one in SERVICES.items() if one["image"].startswith("vllm/")}


def environment(service: dict[str, Any]) -> dict[str, str]:
    return image_environment() | {
        name: value for name, value in service.get("environment", {}).items() if value
    }


@contextmanager
def captured(monkeypatch: pytest.MonkeyPatch, command: Any) -> Iterator[list[Any]]:
    """Yield the arguments that a command would run with, instead of running it."""
    seen: list[Any] = []

    def run(arguments: Any) -> int:
        seen.append(arguments)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(command, "run", run)
        yield seen


def served(monkeypatch: pytest.MonkeyPatch, service: dict[str, Any]) -> Settings:
    """Return the settings that a proxy of compose.yaml would run with."""
    with captured(monkeypatch, serve) as seen:
        assert main(shlex.split(service["command"])) == 0
    with monkeypatch.context() as patch:
        for name, value in environment(service).items():
            patch.setenv(name, value)
        return settings_from(seen[0])


def simulated(
    monkeypatch: pytest.MonkeyPatch, service: dict[str, Any]
) -> tuple[SimFacts, str, int]:
    """Return the engine that a service would simulate, its host and its port."""
    with captured(monkeypatch, sim) as seen:
        assert main(shlex.split(service["command"])) == 0
    return sim.facts_from(seen[0]), seen[0].host, int(seen[0].port)


def option(command: str, name: str) -> str:
    words = shlex.split(command)
    return words[words.index(name) + 1]


# -- configs/


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_is_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "validate", "--config", str(path)]) == 0
    assert capsys.readouterr().out.startswith("ok: ")


def test_the_gpu_configuration_has_the_engines_that_its_comments_start() -> None:
    path = ROOT / "configs/gpu-2p2d.yaml"
    text = path.read_text()
    started = re.findall(
        r"CUDA_VISIBLE_DEVICES=(\d) VLLM_NIXL_SIDE_CHANNEL_PORT=(\d+) vllm serve MODEL --port "
        r"(\d+)[^\n]*\n#[^\n]*\"\$(P|D)\"",
        text,
    )
    roles = {"P": "prefill", "D": "decode"}
    engines = {(engine.url, engine.role) for engine in load(path, {}).pool.nodes}
    assert {(f"http://127.0.0.1:{port}", roles[role]) for *_, port, role in started} == engines
    gpus, side_ports, ports, _ = zip(*started, strict=True)
    assert len(set(gpus)) == len(set(side_ports)) == len(set(ports)) == 4
    for role in roles:
        config = json.loads(re.search(rf"\b{role}='(.*?)'", text)[1])  # type: ignore[index]
        assert config == {
            "kv_connector": "NixlConnector",
            "kv_role": {"P": "kv_producer", "D": "kv_consumer"}[role],
        }


# -- compose.yaml


def test_compose_has_two_and_two_engines_of_each_kind_and_a_proxy_for_each() -> None:
    names = {
        f"{prefix}{role}-{number}"
        for prefix in PROXIES.values()
        for role in ("prefill", "decode")
        for number in (0, 1)
    }
    assert set(SIMS) | set(VLLMS) == names
    assert set(SERVICES) == names | set(PROXIES) | {"gpu-namespace"}


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_of_compose_names_its_engines_and_waits_for_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = served(monkeypatch, SERVICES[name])
    engines = {}
    for node in settings.pool.nodes:
        host, port = node.url.removeprefix("http://").split(":")
        engines[host] = node.role
        engine = SERVICES[host]
        assert option(engine["command"], "--port") == port
        assert option(engine["command"], "--host") == "0.0.0.0"
        assert host.startswith(f"{PROXIES[name]}{node.role}-")
        assert engine.get("profiles") == SERVICES[name].get("profiles")
    assert len(engines) == 4
    assert SERVICES[name]["depends_on"] == {
        host: {"condition": "service_healthy"} for host in engines
    }


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_of_compose_is_published_only_on_the_loopback(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = served(monkeypatch, SERVICES[name])
    assert settings.listen.host == "0.0.0.0"
    (published,) = SERVICES[name]["ports"]
    assert re.fullmatch(rf"127\.0\.0\.1:\d+:{settings.listen.port}", published)
    grace = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace > longest_drain(settings.deadlines, settings.listen.linger)


def test_compose_publishes_nothing_but_the_proxies_on_ports_of_their_own() -> None:
    published = [port for one in SERVICES.values() for port in one.get("ports", ())]
    assert {name for name, one in SERVICES.items() if one.get("ports")} == set(PROXIES)
    assert len({port.rsplit(":", 1)[0] for port in published}) == len(published) == 2


@pytest.mark.parametrize("name", SIMS)
def test_a_simulated_engine_of_compose_is_what_its_name_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, host, port = simulated(monkeypatch, SIMS[name])
    assert name.startswith(f"{facts.role}-")
    assert host == "0.0.0.0"
    assert facts.side_channel_host == name  # what the others can reach
    assert facts.side_channel_port not in (0, port)
    assert "profiles" not in SIMS[name]


@pytest.mark.parametrize("name", VLLMS)
def test_a_real_engine_of_compose_is_what_its_name_says(name: str) -> None:
    engine = VLLMS[name]
    transfer = json.loads(option(engine["command"], "--kv-transfer-config"))
    role = "kv_producer" if "prefill" in name else "kv_consumer"
    assert transfer == {"kv_connector": "NixlConnector", "kv_role": role}
    assert engine["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == name
    assert engine["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] != option(
        engine["command"], "--port"
    )
    assert re.fullmatch(r"vllm/vllm-openai:v\d+\.\d+\.\d+", engine["image"])
    assert engine["profiles"] == ["gpu"]
    assert (
        f"localhost:{option(engine['command'], '--port')}/health"
        in engine["healthcheck"]["test"][-1]
    )
    assert engine["pid"] == engine["ipc"] == "service:gpu-namespace"


def test_real_engines_of_compose_compute_on_different_gpus_that_all_can_see() -> None:
    chosen = [int(one["environment"]["CUDA_VISIBLE_DEVICES"]) for one in VLLMS.values()]
    (seen,) = {
        tuple(device["device_ids"])
        for one in VLLMS.values()
        for device in one["deploy"]["resources"]["reservations"]["devices"]
    }
    assert sorted(chosen) == list(range(len(seen)))


def test_the_gpu_proxy_of_compose_has_the_limits_of_the_gpu_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, written = (
        served(monkeypatch, SERVICES["gpu-proxy"]),
        load(ROOT / "configs/gpu-2p2d.yaml", {}),
    )
    assert (settings.deadlines, settings.limits) == (written.deadlines, written.limits)


def test_services_of_compose_depend_only_on_their_own_half() -> None:
    for one in SERVICES.values():
        shared = [
            one[key].removeprefix("service:")
            for key in ("pid", "ipc")
            if one.get(key, "").startswith("service:")
        ]
        for other in (*one.get("depends_on", {}), *shared):
            assert SERVICES[other].get("profiles") == one.get("profiles")


def test_our_services_of_compose_run_the_image_of_our_dockerfile_without_rights() -> None:
    ours = {name: one for name, one in SERVICES.items() if name not in VLLMS}
    assert {(one["build"], one["image"]) for one in ours.values()} == {(".", "pdproxy:local")}
    assert all(one["read_only"] and one["cap_drop"] == ["ALL"] for one in ours.values())


def test_the_comments_of_compose_name_each_variable_with_its_default() -> None:
    text = (ROOT / "compose.yaml").read_text()
    used = {(match["name"], match["default"]) for match in VARIABLE.finditer(text) if match["name"]}
    documented = set(
        re.findall(r"\b([A-Z_0-9]+)=(\S*)", text.split("# Variables")[1].split("\nname:")[0])
    )
    assert {name for name, _ in used} - {f"GPU_{number}" for number in (1, 2)} == {
        name for name, _ in documented
    }
    assert documented <= used


# -- configs/systemd


def service(name: str = "pdproxy") -> configparser.SectionProxy:
    """Return the section `Service` of a unit, which sets nothing twice."""
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / f"configs/systemd/{name}.service")
    return unit["Service"]


def test_the_service_starts_the_proxy_with_settings_that_can_be_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, *words = shlex.split(service()["ExecStart"])
    with captured(monkeypatch, serve) as seen:
        assert main(words) == 0
    assert Path(program).name == "pdproxy"
    assert seen[0].config == Path("/etc/pdproxy/pdproxy.yaml")  # SIGHUP is ignored without a file
    assert service()["ExecReload"].split()[1:] == ["-HUP", "$MAINPID"]
    assert main(["serve", "--config", "/nothing.yaml"]) == int(
        service()["RestartPreventExitStatus"]
    )


def test_the_service_has_the_time_and_the_files_that_the_default_settings_need() -> None:
    settings = load(ROOT / "configs/2p2d.yaml", {})
    longest = longest_drain(settings.deadlines, settings.listen.linger)
    assert float(service()["TimeoutStopSec"]) > longest
    assert f"takes {longest:g} s at most" in (ROOT / "configs/systemd/pdproxy.service").read_text()
    assert int(service()["LimitNOFILE"]) > files_needed(settings)
    assert service()["KillMode"] == "mixed"  # a worker that gets SIGTERM is started again


# -- the Dockerfile


def test_the_image_is_built_on_pinned_versions() -> None:
    bases = {one.rest.split()[0] for one in dockerfile() if one.name == "FROM"}
    (base,) = bases - stages().keys()
    assert re.fullmatch(r"python:3\.\d+(\.\d+)?-slim-[a-z]+", base)


def test_the_images_differ_in_what_tokenizes_alone() -> None:
    """And in nothing that was forgotten."""
    smaller, larger = stages()[""], stages()["tokenizer"]
    assert (
        [one.name for one in smaller[-2:]] == [one.name for one in larger[-2:]] == ["FROM", "COPY"]
    )
    assert smaller[:-2] == larger[:-2]
    for name, lock in (("build", "image"), ("build-tokenizer", "image-tokenizer")):
        run = [one.rest for one in stages()[name] if one.name == "RUN"][-1]
        assert f"--require-hashes -r requirements-{lock}.lock" in run
    without, complete = (
        pinned(f"requirements-{lock}.lock") for lock in ("image", "image-tokenizer")
    )
    assert without.items() < complete.items()
    assert {"transformers", "tokenizers", "numpy", "huggingface-hub"} <= (complete.keys() - without)


def pinned(lock: str) -> dict[str, tuple[str, list[str]]]:
    """The packages of a lock, each with its version and the hashes of its files."""
    text = (ROOT / lock).read_text()
    entries = re.split(
        r"^(?=[\w.-]+==)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE
    )
    return {
        one.split("==")[0]: (one.split("==")[1].split()[0], re.findall(r"--hash=(\S+)", one))
        for one in entries
        if one
    }


@pytest.mark.parametrize("lock", sorted(path.name for path in ROOT.glob("requirements*.lock")))
def test_a_lock_has_a_hash_for_every_file(lock: str) -> None:
    """Each package one at least, and the version and hashes that it has where the tests run."""
    every, found = pinned("requirements.lock"), pinned(lock)
    assert len(found) > 5
    for name, (version, hashes) in found.items():
        assert hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), name
        assert (version, hashes) == every.get(name, (version, hashes))


def test_the_locks_pin_all_that_is_installed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=; ]", one)[0].lower().replace("_", "-") for one in requirements}

    extras = project["optional-dependencies"]
    image = [*project["dependencies"], *extras["kubernetes"], *extras["tracing"]]
    assert names(image) <= pinned("requirements-image-tokenizer.lock").keys()
    assert names(image) - {"transformers"} <= pinned("requirements-image.lock").keys()
    assert names(extras["build"]) <= pinned("requirements-build.lock").keys()
    installed = [*project["dependencies"], *extras["test"], *extras["build"], *extras["site"]]
    assert names(installed) <= pinned("requirements.lock").keys()


@pytest.mark.parametrize(
    "path", [".ci/run", ".ci/full", "Dockerfile", ".github/workflows/release.yml"]
)
def test_what_is_locked_is_installed_by_its_hashes(path: str) -> None:
    """Each line that installs a lock asks for hashes; nothing is built by a builder that pip has
    fetched by itself.
    """
    lines = [
        line
        for line in (ROOT / path).read_text().splitlines()
        if "pip" in line and ".lock" in line and "-r " in line
    ]
    assert lines
    assert all("--require-hashes" in line for line in lines)


def test_the_build_context_holds_what_the_dockerfile_copies() -> None:
    ignored = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert ignored[0] == "*"
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = [
        one.rest.split()[:-1]
        for one in dockerfile()
        if one.name == "COPY" and "--from" not in one.rest
    ]
    assert {name for names in copied for name in names} == kept
    assert all((ROOT / name).exists() for name in kept)


def test_the_image_does_not_run_as_root_and_names_its_user_by_number() -> None:
    uid, gid = the("USER").split(":")
    assert int(uid) > 0
    assert int(gid) > 0


def test_the_image_serves_where_a_network_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, words = json.loads(the("ENTRYPOINT")), json.loads(the("CMD"))
    assert entry == ["pdproxy"]
    command = f"{shlex.join(words)} --decode d:1"
    settings = served(monkeypatch, {"command": command})
    assert settings.listen.host == "0.0.0.0"
    assert the("EXPOSE") == str(settings.listen.port)
    port = {"PDPROXY_LISTEN__PORT": "9000"}
    assert served(monkeypatch, {"command": command, "environment": port}).listen.port == 9000


async def health_check(port: int, folder: Path, config: str | None = None) -> tuple[int, bool]:
    """Run the image's health check against a port of this machine; return its exit code, and
    whether it has started Python. `folder`: where it finds `pdproxy`.
    """
    options, _, words = the("HEALTHCHECK").partition(" CMD ")
    *shell, command = json.loads(words)
    within = re.search(r"--timeout=(\d+)s", options)
    waits = re.search(r"read -r -t (\d+) ", command), re.search(r"--timeout ([\d.]+)$", command)
    assert within is not None
    assert sum(float(one[1]) for one in waits if one is not None) < float(within[1])
    program, started = folder / "pdproxy", folder / "started"
    started.unlink(missing_ok=True)
    program.write_text(f'#!/bin/sh\ntouch {started}\nexec {sys.executable} -m pdproxy "$@"\n')
    program.chmod(0o755)
    env = os.environ | image_environment() | {"PDPROXY_LISTEN__PORT": str(port)}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}"} | (
        {"PDPROXY_CONFIG": config} if config else {}
    )
    # The check must not use an HTTP proxy of the environment.
    env |= {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    process = await asyncio.create_subprocess_exec(
        *shell, command, env=env, stderr=asyncio.subprocess.DEVNULL
    )
    return await asyncio.wait_for(process.wait(), 30), started.exists()


async def test_the_health_check_detects_a_process_that_is_down_or_gone(tmp_path: Path) -> None:
    """Python starts only where the place is in a file, or to say what is wrong."""
    file = tmp_path / "x.yaml"
    async with SimServer() as engine:
        assert await health_check(engine.port, tmp_path) == (0, False)
        file.write_text("listen: {keep_alive: 60}")
        assert await health_check(engine.port, tmp_path, str(file)) == (0, True)
        engine.engine.kill_core()
        assert await health_check(engine.port, tmp_path) == (1, True)
    assert await health_check(engine.port, tmp_path) == (1, True)


def test_the_service_of_up_has_the_time_that_its_proxy_and_its_engines_need() -> None:
    unit = service("pdproxy-up")
    settings = load(ROOT / "configs/2p2d.yaml", {})
    proxy = longest_drain(settings.deadlines, settings.listen.linger)
    assert float(unit["TimeoutStopSec"]) > proxy + GRACE
    assert unit["KillMode"] == "mixed"  # `up` ends the engines, behind the proxy
    for key, applies in (("ExecStart", False), ("ExecReload", True)):
        words = unit[key].replace("$UP", "org/m --print -- --max-model-len 4096")
        found = parser_for(["up"]).parse_args(shlex.split(words)[1:])
        assert found.model == "org/m"
        assert found.rest == ["--max-model-len", "4096"]
        assert found.apply == applies
