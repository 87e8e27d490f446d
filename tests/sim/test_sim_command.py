"""`pdproxy sim`, as a process and as a command line."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from pdproxy.cli.main import main
from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.cli import sim
from pdproxy_lab.sim.facts import (
    CpuBuffer,
    ECExtraConfig,
    ECTransferConfig,
    LMCacheFacts,
    MooncakeFacts,
    SimFacts,
)

PATIENCE = 30
ENCODES = '--ec-transfer-config {"ec_connector":"ECExampleConnector","ec_role":"ec_producer"}'
PUSHED = '--ec-transfer-config {"ec_connector":"ECMooncakeConnector","ec_role":"ec_consumer"}'


@contextmanager
def running(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its ready line."""
    line = [sys.executable, "-m", "pdproxy", "sim", "--port", "0", *options]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def fetch(url: str, body: object = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return answer.status, answer.read()


def test_the_process_says_when_it_is_ready_and_ends_well_on_sigterm() -> None:
    with running(
        "--role", "decode", "--model", "m", "--speed", "0", "--admin-port", "0", "--seed", "3"
    ) as (
        process,
        ready,
    ):
        found = re.fullmatch(
            r"simulated decode engine of 'm' on (http://\S+), admin on (http://\S+)\n", ready
        )
        assert found, ready
        assert fetch(f"{found[1]}/health") == (200, b"")
        assert json.loads(fetch(f"{found[1]}/v1/models")[1])["data"][0]["id"] == "m"
        assert json.loads(fetch(f"{found[2]}/state")[1])["life"] == "up"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=PATIENCE) == ("", "")
        assert process.returncode == 0


def test_the_process_ends_on_sigint_with_a_request_under_way() -> None:
    with running("--fault", "stall@queued") as (process, ready):
        port = int(ready.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
            body = b'{"prompt":"a","max_tokens":1}'
            head = (
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n"
            )
            client.sendall(head % len(body) + body)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE)[1] == ""
            assert process.returncode == 0


def test_the_same_seed_says_the_same() -> None:
    said = []
    for _ in range(2):
        with running("--seed", "5", "--speed", "0") as (_, ready):
            body = {"prompt": "one two", "max_tokens": 5}
            said.append(
                json.loads(fetch(ready.split()[-1] + "/v1/completions", body)[1])["choices"]
            )
    assert said[0] == said[1]


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for option in ("--port", "--admin-port", "--side-channel-port"):
            more = ["--port", "0"] if option != "--port" else []
            assert main(["sim", *more, option, str(port)]) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            assert str(port) in error
            assert os.strerror(errno.EADDRINUSE).lower() in error.lower()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--block-size x", "--block-size"),
        ("--block-size 0", "--block-size"),
        ("--num-gpu-blocks 3", "--num-gpu-blocks"),
        ("--kv-lease-duration 0", "--kv-lease-duration"),
        ("--role master", "--role"),
        ("--connector teleport", "--connector"),
        ("--kv-role nobody", "--kv-role"),
        ("--connector lmcache-pd", "--role"),
        ("--connector lmcache-pd --role prefill", "--notify"),
        ("--connector lmcache-pd --role decode --chunk-size 40", "--chunk-size"),
        ("--connector lmcache-mp --notify tcp://127.0.0.1:7500", "--notify"),
        ("--connector shared --notify tcp://127.0.0.1:7500", "--notify"),
        ("--connector nixl-push --notify tcp://127.0.0.1:7500", "--notify"),
        ("--connector nixl-push --engine-id=", "--engine-id"),
        ("--engine-id p", "--engine-id"),
        ("--pd-peer-init-port 70000", "--pd-peer-init-port"),
        ("--template none", "--template"),
        ("--speed -1", "--speed"),
        ("--speed fast", "--speed"),
        ("--speed nan", "--speed"),
        ("--prefill-tokens-per-s 0", "--prefill-tokens-per-s"),
        ("--port 70000", "--port"),
        ("--port http", "--port"),
        ("--admin-port -1", "--admin-port"),
        ("--seed x", "--seed"),
        ("--model=", "--model"),
        ("--role encode", "--role"),
        (f"--connector none {ENCODES}", "--role"),
        (f"--role encode --vision {ENCODES}", "--connector"),
        (f"--role encode --connector none {ENCODES}", "--vision"),
        ("--ec-transfer-config {", "--ec-transfer-config"),
        (
            '--ec-transfer-config {"ec_connector":"ECCPUConnector","ec_role":"ec_both"}',
            "ec_cpu_bytes",
        ),
        (f"{PUSHED} --data-parallel-size 2", "--data-parallel-size"),
        ("--ec-side-channel-port 70000", "--ec-side-channel-port"),
        ("--fault nonsense", "--fault nonsense"),
        ("--fault reset@never", "--fault reset@never"),
        ("--fault reset:next=0", "next"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_option(
    line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *line.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pdproxy sim: ")
    assert named in error
    assert error.count("\n") == 1


def test_an_address_of_another_machine_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--port", "0", "--host", "192.0.2.1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def arguments(*options: str) -> object:
    from pdproxy.cli.parser import Parser

    commands = Parser().add_subparsers()
    sim.add(commands, "")
    return commands.choices["sim"].parse_args(options)


def test_every_fact_is_an_option() -> None:
    options = []
    left_out = (
        "role",
        "hardware",
        "lmcache",
        "cpu",
        "mooncake",
        "kv_role",
        "api_key",
        "engine_id",
        "notify",
        "register",
        "kv_events",
        "ec_transfer_config",
        "pd_allocation_timeout_sec",
    )
    for kind in (SimFacts, Hardware, LMCacheFacts, CpuBuffer, MooncakeFacts):
        for field in msgspec.structs.fields(kind):
            if field.name not in left_out:
                value = getattr(kind(), field.name)
                option = field.name.replace("_", "-")
                options += (
                    [f"--{'' if value else 'no-'}{option}"]
                    if isinstance(value, bool)
                    else [f"--{option}={value}"]
                )
    options += [
        "--kv-role=kv_both",
        "--api-key=k",
        "--notify=tcp://x:1",
        "--pd-allocation-timeout-sec=5",
    ]
    assert sim.facts_from(arguments(*options)) == SimFacts(  # type: ignore[arg-type]
        kv_role="kv_both",
        api_key="k",
        notify="tcp://x:1",
        lmcache=LMCacheFacts(pd_allocation_timeout_sec=5),
    )
    assert sim.facts_from(arguments()) == SimFacts()  # type: ignore[arg-type]
    assert sim.facts_from(arguments("--speed=0", "--no-enable-prefix-caching")) == SimFacts(  # type: ignore[arg-type]
        hardware=Hardware(speed=0), enable_prefix_caching=False
    )
    assert sim.facts_from(arguments("--connector=nixl-push", "--engine-id=p")) == SimFacts(  # type: ignore[arg-type]
        connector="nixl-push", engine_id="p"
    )
    ec = {
        "ec_connector": "ECMooncakeConnector",
        "ec_role": "ec_producer",
        "ec_port": 5,
        "ec_connector_extra_config": {"push_wait_timeout_s": 3, "mooncake_protocol": "tcp"},
    }
    line = [
        "--role=encode",
        "--vision",
        "--connector=none",
        f"--ec-transfer-config={json.dumps(ec)}",
    ]
    config = ECTransferConfig(
        ec_connector="ECMooncakeConnector",
        ec_role="ec_producer",
        ec_port=5,
        ec_connector_extra_config=ECExtraConfig(push_wait_timeout_s=3),
    )
    assert sim.facts_from(arguments(*line)) == SimFacts(  # type: ignore[arg-type]
        role="encode", vision=True, connector="none", ec_transfer_config=config
    )


def test_help_names_every_kind_of_fault(capsys: pytest.CaptureFixture[str]) -> None:
    from pdproxy_lab.sim.faults.kinds import KINDS
    from pdproxy_lab.sim.faults.moments import MOMENTS

    assert main(["sim", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {kind} " in said for kind in KINDS)
    assert all(moment in said for moment in MOMENTS)
