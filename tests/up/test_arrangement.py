"""Which engines are started on which machine, with the reasons and the refusals."""

from typing import Any

import pytest

from pdproxy.scheduling.slo import Slo
from pdproxy_lab.up.arrangement import Chosen, PlannedEngine, arrange, most_engines
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.gpus import GpuProcess
from pdproxy_lab.up.machine import Machine
from pdproxy_lab.up.model import Model
from pdproxy_lab.up.options import Load, UpOptions, gpu_list, value_of
from tests.up.machines import GIB, AllFree, gpu, machine, model, planned

BUSY = gpu(1, GpuProcess(4242, "python", 62 * GIB))


@pytest.mark.parametrize(
    ("on", "served", "options", "engines"),
    [
        (machine(2), model(), {}, "any-0:0 any-1:1"),
        (machine(1), model(), {}, "aggregated-0:0"),
        (
            machine(4),
            model(16),
            {"arrangement": "1P3D"},
            "prefill-0:0 decode-0:1 decode-1:2 decode-2:3",
        ),
        (machine(4), model(), {"arrangement": "2A"}, "aggregated-0:0 aggregated-1:1"),
        (machine(4), model(140), {}, "any-0:0,1 any-1:2,3"),
        (machine(8), model(500), {}, "aggregated-0:0,1,2,3,4,5,6,7"),
        (machine(8), model(), {"gpus": (3, 5)}, "any-0:3 any-1:5"),
        (machine(8, visible="2,GPU-4444"), model(), {}, "any-0:2 any-1:4"),
        (machine([gpu(0), BUSY, gpu(2)]), model(), {}, "any-0:0 any-1:2"),
        (machine(4), model(None), {}, "any-0:0 any-1:1 any-2:2 any-3:3"),
        (machine(0, cpu=True), model(1), {}, "any-0: any-1:"),
        (machine(0, cpu=True), model(1), {"arrangement": "1P1D"}, "prefill-0: decode-0:"),
    ],
)
def test_engines_by_machine_and_model(
    on: Machine, served: Model, options: dict[str, Any], engines: str
) -> None:
    plan = planned(on, served, **options)
    assert [f"{one.name}:{','.join(map(str, one.gpus))}" for one in plan.engines] == engines.split()
    given = [p for one in plan.engines for p in (one.port, one.side_port, one.replay_port) if p]
    assert len(set(given)) == len(given)
    assert plan.events_port not in given


@pytest.mark.parametrize(
    ("on", "served", "flags", "options", "told"),
    [
        (
            machine(1),
            model(140),
            (),
            {},
            "weights of 140.0 GiB and KV need 2 GPUs, and 1 of 140.0 GiB",
        ),
        (
            machine(2),
            model(),
            ("-tp", "4"),
            {},
            "does not fit: weights of 16.0 GiB and KV need 4 GPUs",
        ),
        (
            machine(4),
            model(140, heads=33),
            (),
            {},
            "has 33 attention heads, which 2 GPUs can't share out",
        ),
        (
            machine(0, cpu=True),
            model(30),
            (),
            {},
            "2 engines with weights of 30.0 GiB and KV need 75.0 GiB",
        ),
        (
            machine([gpu(0), BUSY]),
            model(),
            (),
            {"gpus": (0, 1)},
            "GPU 1 can't be used: it is in use by process 4242 (python, 62.0 GiB)",
        ),
        (
            machine([BUSY]),
            model(),
            (),
            {},
            "no GPU is free: GPU 1 is left out: it is in use by process 4242",
        ),
        (
            machine([gpu(0, divided="MIG")]),
            model(),
            (),
            {"gpus": (0,)},
            "GPU 0 can't be used: it is divided (MIG)",
        ),
        (
            machine(2),
            model(),
            (),
            {"gpus": (0, 2)},
            "--gpus: there is no GPU 2; nvidia-smi lists 0, 1",
        ),
        (machine(2, visible="7"), model(), (), {}, "CUDA_VISIBLE_DEVICES=7 names none"),
        (machine(0), model(), (), {}, "and neither nvidia-smi nor amd-smi finds one here"),
        (
            machine(2, connectors=()),
            model(),
            (),
            {},
            "`/venv/bin/python -m pip install nixl`, or --arrangement 2A",
        ),
        (
            machine(2),
            model(),
            (),
            {"arrangement": "2P6D"},
            "has 8 engines, and the free GPUs are enough for 2",
        ),
        (
            machine(2),
            model(),
            (),
            {"arrangement": "2P"},
            "2P has engines for one half of a request only",
        ),
        (
            machine(2),
            model(),
            (),
            {"arrangement": "6D2D"},
            "expected auto, any, or numbers of engines",
        ),
        (
            machine(2),
            model(),
            (),
            {"arrangement": "0A"},
            "expected auto, any, or numbers of engines",
        ),
        (machine(2), model(), ("--port=1",), {}, "--port can't be given to the engines"),
        (
            machine(2),
            model(),
            ("--kv_transfer_config", "{}"),
            {},
            "--kv-transfer-config can't be given",
        ),
        (
            machine(2),
            model(),
            ("--max-num-seqs", "x"),
            {},
            "--max-num-seqs: expected a whole number",
        ),
        (machine(2), model(), ("--gpu-memory-utilization", "2"), {}, "expected a share up to 1"),
        (machine(0, cpu=True), model(1), (), {"gpus": (0,)}, "--gpus: this vLLM is built for CPUs"),
        (
            machine(2),
            model(),
            (),
            {"load": Load(rate=3.0), "profile": "p"},
            "--rate: needs --slo and --profile, by which the arrangement is chosen",
        ),
        (
            machine(2),
            model(),
            (),
            {"load": Load("5:5"), "slo": Slo(ttft=1.0)},
            "--input-tokens: needs --slo and --profile",
        ),
        (
            machine(2),
            model(),
            (),
            {"load": Load(output_tokens="5:5"), "arrangement": "any"},
            "--output-tokens: --arrangement any says which engines are started",
        ),
    ],
)
def test_each_refusal_is_one_sentence(
    on: Machine, served: Model, flags: tuple[str, ...], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UpError) as refused:
        planned(on, served, *flags, **options)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.code == 2


def test_reasons_are_said() -> None:
    words = planned(machine([gpu(0), BUSY, gpu(2)], links={(0, 2): "SYS"})).reasons
    assert words[0].startswith("GPU 1 is left out: it is in use by process 4242")
    assert "GPUs 0, 2: NVIDIA H200, 140.0 GiB each." in words
    assert "GPUs 0 and 2 have no NVLink (SYS): KV moves slower between them." in words
    assert (
        "org/model has weights of 16.0 GiB: one GPU holds them and a quarter more for KV." in words
    )
    assert "All are linked by NVLink (NV18)." in planned(machine(2)).reasons
    unused = planned(machine(4), arrangement="1P1D").reasons
    assert "1P1D leaves the GPUs of 2 engines unused." in unused


def test_what_was_chosen_for_a_load_is_started() -> None:
    on, served = machine(8), model(140)
    options = UpOptions("m")
    assert most_engines(on, served, options) == 4
    chosen = Chosen("1P3D", {"prefill": 4096, "decode": 512}, ("Best.",))
    plan = arrange(on, served, options, AllFree(), chosen=chosen)
    assert [one.role for one in plan.engines] == ["prefill", "decode", "decode", "decode"]
    assert plan.chunks == {"prefill": 4096, "decode": 512}
    at = plan.reasons.index("Best.")
    assert "engine on 2 GPUs" in plan.reasons[at + 1]
    given = UpOptions("m", flags=("--max-num-batched-tokens", "64"))
    assert set(arrange(on, served, given, AllFree(), chosen=chosen).chunks.values()) == {64}
    nothing = arrange(on, served, options, AllFree(), chosen=Chosen("auto"))
    assert nothing == arrange(on, served, options, AllFree())


def test_engines_that_run_keep_their_gpus_and_ports() -> None:
    on = machine([gpu(0, GpuProcess(1, "vllm", 120 * GIB)), gpu(1)])
    assert len(planned(on).engines) == 1
    old = PlannedEngine("any-1", "any", (1,), 8207, 5611, 5722)
    plan = arrange(
        on,
        model(),
        UpOptions("m"),
        AllFree(),
        ours=[0],
        before=[old],
        events_before=5999,
    )
    assert plan.engines[1] == old
    assert plan.engines[0].port == 8200
    assert plan.events_port == 5999


def test_values_of_vllms_flags() -> None:
    flags = ["--max_num_seqs", "4", "-tp=2", "--max-num-seqs=8", "--enforce-eager"]
    assert value_of(flags, "--max-num-seqs") == "8"
    assert value_of(flags, "--tensor-parallel-size") == "2"
    assert value_of(flags, "--dtype") is None


@pytest.mark.parametrize(
    ("text", "found"), [("0-3", (0, 1, 2, 3)), ("0,2", (0, 2)), ("1-2, 5", (1, 2, 5)), ("7", (7,))]
)
def test_lists_of_gpus(text: str, found: tuple[int, ...]) -> None:
    assert gpu_list(text) == found


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,1", "0-", "0-99", "-1", "1234567890"])
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"got|twice"):
        gpu_list(text)
