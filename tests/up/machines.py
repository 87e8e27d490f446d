"""Machines for tables of arrangements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdproxy_lab.up.arrangement import Plan, arrange, refuse_wrong
from pdproxy_lab.up.gpus import Gpu, GpuProcess, Gpus
from pdproxy_lab.up.machine import Machine, Ports, Vllm
from pdproxy_lab.up.model import Model
from pdproxy_lab.up.nvidia_gpus import NVIDIA
from pdproxy_lab.up.options import UpOptions
from pdproxy_lab.up.vllm import FoundVllm

GIB = 1 << 30
PYTHON, PROGRAM = Path("/venv/bin/python"), Path("/venv/bin/vllm")


class AllFree(Ports):
    """Ports of a machine on which nobody listens."""

    def take(self, first: int, preferred: Any = ()) -> int:
        for port in (*preferred, *range(first, 65_536)):
            if port not in self._given:
                self._given.add(port)
                return port
        raise AssertionError


def gpu(index: int, *users: GpuProcess, used: int = 4 << 20, divided: str | None = None) -> Gpu:
    uuid = f"GPU-{index}{index}{index}{index}"
    return Gpu(index, uuid, "NVIDIA H200", 140 * GIB, used, divided, users)


def machine(gpus: int | list[Gpu] = 2, **changes: Any) -> Machine:
    listed = [gpu(index) for index in range(gpus)] if isinstance(gpus, int) else gpus
    links = {(a.index, b.index): "NV18" for a in listed for b in listed if a.index < b.index}
    connectors = changes.pop("connectors", ("nixl",))
    found = FoundVllm("0.32.0", connectors, cpu=changes.pop("cpu", False))
    of = Gpus(changes.pop("vendor", NVIDIA), listed, changes.pop("links", links))
    visible = changes.pop("visible", None)
    given = {"memory": 64 * GIB, "cores": 8, **changes}
    if visible is not None:
        given["visible"] = ("CUDA_VISIBLE_DEVICES", visible)
    return Machine(Vllm(PROGRAM, PYTHON, found), of, **given)


def model(gib: float | None = 16, heads: int | None = 32) -> Model:
    weights = None if gib is None else int(gib * GIB)
    return Model("org/model", "org/model", weights is not None, weights, heads)


def planned(
    on: Machine, served: Model | None = None, *flags: str, ours: Any = (), **options: Any
) -> Plan:
    wanted = UpOptions("org/model", flags=flags, **options)
    refuse_wrong(wanted)
    return arrange(on, served or model(), wanted, AllFree(), ours=ours)
