"""One engine's command line and environment, and the settings of the proxy in front."""

import json
from typing import Any

import pytest
import yaml

from pdproxy.scheduling.slo import Slo
from pdproxy_lab.up.amd_gpus import AMD
from pdproxy_lab.up.arrangement import Plan
from pdproxy_lab.up.command import EngineCommand, command
from pdproxy_lab.up.options import UpOptions
from pdproxy_lab.up.settings_file import settings_text, settings_tree
from tests.up.machines import machine, model, planned


def commanded(plan: Plan, number: int = 0, *flags: str, **given: str) -> EngineCommand:
    return command(plan.engines[number], plan, machine().vllm, flags, given)


def value(line: EngineCommand, flag: str) -> str:
    return line.arguments[line.arguments.index(flag) + 1]


def test_a_cpu_needs_flags_and_environment_of_its_own() -> None:
    plan = planned(machine(0, cpu=True, cores=6), model(1), arrangement="1P1D")
    line = commanded(plan, 1, "--max-model-len", "512", UCX_TLS="mine")
    assert line.arguments[:4] == (
        "/venv/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
    )
    assert json.loads(value(line, "--kv-transfer-config")) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_buffer_device": "cpu",
    }
    assert line.arguments[-2:] == ("--max-model-len", "512")
    assert "UCX_TLS" not in line.environment
    assert line.environment["OMP_NUM_THREADS"] == "3"
    assert line.environment["HF_HUB_OFFLINE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in line.environment


@pytest.mark.parametrize(
    ("options", "roles"),
    [
        ({}, ["kv_both", "kv_both"]),
        ({"arrangement": "1P1D"}, ["kv_producer", "kv_consumer"]),
        ({"arrangement": "2A"}, [None, None]),
    ],
)
def test_roles_of_kv(options: dict[str, Any], roles: list[str | None]) -> None:
    plan = planned(machine(2), **options)
    for number, role in enumerate(roles):
        line = commanded(plan, number)
        if role is None:
            assert "--kv-transfer-config" not in line.arguments
            assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in line.environment
        else:
            assert json.loads(value(line, "--kv-transfer-config"))["kv_role"] == role


def test_gpus_are_the_engines_own_in_the_order_of_nvidia_smi() -> None:
    plan = planned(machine(4), model(140))
    line = commanded(plan, 1, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert line.arguments[:3] == ("/venv/bin/vllm", "serve", "org/model")
    assert line.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert line.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert value(line, "--tensor-parallel-size") == "2"
    assert "--dtype" not in line.arguments


def test_engines_on_gpus_of_amd_get_the_variables_of_hip() -> None:
    """Both, which vLLM wants to be alike, and nothing of CUDA's memory."""
    line = commanded(planned(machine(4, vendor=AMD), model(140)), 1, HIP_VISIBLE_DEVICES="3")
    own = {name: text for name, text in line.environment.items() if "VISIBLE" in name}
    assert own == {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert "UCX_CUDA_IPC_CACHE" not in line.environment
    assert "CUDA_DEVICE_ORDER" not in line.environment


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("CUDA_VISIBLE_DEVICES", "1")),
        (
            {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"},
            ("HIP_VISIBLE_DEVICES", "2"),
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": ""},
            ("CUDA_VISIBLE_DEVICES", "1"),
        ),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("CUDA_VISIBLE_DEVICES", "")),
    ],
)
def test_the_gpus_to_use_are_named_by_the_vendors_variables(
    env: dict[str, str], found: tuple[str, str] | None
) -> None:
    assert AMD.visible(env) == found


def test_an_engine_can_start_again_while_others_run() -> None:
    """UCX would keep the memory of one that has ended in use. Who says otherwise is heard."""
    assert commanded(planned(machine(2)), 0).environment["UCX_CUDA_IPC_CACHE"] == "n"
    assert (
        "UCX_CUDA_IPC_CACHE" not in commanded(planned(machine(2), arrangement="2A"), 0).environment
    )
    heard = commanded(planned(machine(2)), 0, UCX_CUDA_IPC_CACHE="y").environment
    assert "UCX_CUDA_IPC_CACHE" not in heard


def test_no_engine_offers_its_kv_events_to_the_network() -> None:
    plan = planned(machine(2))
    for number in range(2):
        events = json.loads(value(commanded(plan, number), "--kv-events-config"))
        assert events["endpoint"] == f"tcp://127.0.0.1:{plan.events_port}"
        assert events["replay_endpoint"].startswith("tcp://127.0.0.1:")


def settings(plan: Plan, **options: Any) -> Any:
    text = settings_text(settings_tree(plan, UpOptions("m", **options), "unix:/x/admin.sock"))
    return yaml.safe_load(text)


def test_the_settings_name_what_the_engines_were_started_with() -> None:
    plan = planned(machine(2), None, "--max-num-batched-tokens", "512", "--max-num-seqs", "64")
    tree = settings(plan, slo=Slo(0.5, 0.03), profile="h200-8b")
    pool = tree["pools"][0]
    assert pool["slo"] == {"ttft": 0.5, "tpot": 0.03}
    assert pool["profile"] == "h200-8b"
    assert tree["listen"] == {"admin": "unix:/x/admin.sock"}
    for engine, node in zip(plan.engines, pool["nodes"], strict=True):
        events = json.loads(value(commanded(plan, int(engine.name[-1])), "--kv-events-config"))
        del events["enable_kv_cache_events"]
        assert node == {
            "url": f"http://127.0.0.1:{engine.port}",
            "role": "any",
            "facts": {"max_num_batched_tokens": 512, "max_num_seqs": 64, "kv_events": events},
        }
    assert value(commanded(plan), "--max-num-batched-tokens") == "512"


def test_a_prefill_engine_serves_while_the_only_decode_engine_starts_again() -> None:
    one = settings(planned(machine(2), arrangement="1P1D"))["pools"][0]["nodes"]
    two = settings(planned(machine(3), arrangement="1P2D"))["pools"][0]["nodes"]
    assert [node.get("serves_whole") for node in one] == [True, None]
    assert [node.get("serves_whole") for node in two] == [None, None, None]
