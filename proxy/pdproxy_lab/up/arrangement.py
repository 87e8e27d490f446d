"""Which engines are started: their roles, GPUs and ports, from the machine, the model and the
options. Pure, but for the ports, which are looked for.

Owns the reasons, a sentence each, that are shown before the start, and the refusals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.gpus import Gpu, Gpus, Vendor, gib
from pdproxy_lab.up.machine import Machine, Ports
from pdproxy_lab.up.model import Model
from pdproxy_lab.up.options import UpOptions, number_of, refuse_own, value_of

Role = Literal["prefill", "decode", "aggregated", "any"]

FIRST_PORTS: Mapping[Role, int] = {"prefill": 8200, "decode": 8300, "aggregated": 8100, "any": 8200}
FIRST_SIDE_PORT, FIRST_REPLAY_PORT, EVENTS_PORT = 5600, 5700, 5557
KV_SHARE = 0.25
"""Of the weights' bytes, so much more is wanted for KV, at least."""
UTILIZATION = 0.9
"""Of a GPU's memory, vLLM takes so much by default (`--gpu-memory-utilization`)."""
CPU_ENGINES = 2
"""Engines on CPUs, where the arrangement names no number: the fewest between which KV moves."""
MAX_ENGINES = 64
CHUNKS: Mapping[Role, int] = {"prefill": 8192, "decode": 2048, "aggregated": 2048, "any": 2048}
"""`--max-num-batched-tokens`: what generates pauses its streams for one such step while it computes
a prompt; prefill engines have no streams.
"""
_PARTS = re.compile(r"(\d{1,2})([PDA])")
_ROLES: Mapping[str, Role] = {"P": "prefill", "D": "decode", "A": "aggregated"}
_EXPECTED = "expected auto, any, or numbers of engines such as 2P6D or 4A"


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine. `gpus`: indices, none on a CPU. `side_port`: of NIXL's handshake, None for one
    without a connector.
    """

    name: str
    role: Role
    gpus: tuple[int, ...]
    port: int
    side_port: int | None
    replay_port: int
    """Where it is asked for KV events again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The engines, and what holds for all of them. `threads`: on CPUs, so many for each engine;
    None on GPUs. `events_port`: where the proxy hears of the engines' KV; None: nowhere.
    """

    model: Model
    engines: tuple[PlannedEngine, ...]
    events_port: int | None
    threads: int | None = None
    tensor_parallel: int = 1
    chunks: Mapping[Role, int | None] = field(default_factory=dict)
    """By role; None: vLLM's default."""
    max_num_seqs: int | None = None
    reasons: tuple[str, ...] = ()
    vendor: Vendor | None = None
    """Who made the GPUs; None: the engines run on CPUs."""

    @property
    def roles(self) -> set[Role]:
        """Those that occur."""
        return {one.role for one in self.engines}

    @property
    def is_split(self) -> bool:
        """Whether KV moves between engines."""
        return bool(self.roles - {"aggregated"})


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen for a load: an arrangement such as `2P6D`, `auto` if there is no answer;
    `--max-num-batched-tokens` by role, the usual ones if there are none; and the reasons.
    """

    arrangement: str
    chunks: Mapping[Role, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def arrange(
    machine: Machine,
    model: Model,
    options: UpOptions,
    ports: Ports,
    *,
    chosen: Chosen | None = None,
    ours: Iterable[int] = (),
    before: Sequence[PlannedEngine] = (),
    events_before: int | None = None,
) -> Plan:
    """Return what to start. `chosen`: for the load; None: no load is known. `ours`: GPUs in use by
    engines that were started before. `before`, `events_before`: these engines and their port for
    events: ports stay what they were.

    Raises:
        UpError: one sentence.
    """
    reasons: list[str] = []
    if machine.is_cpu:
        groups: list[tuple[int, ...]] = [()] * _cpu_engines(options)
        parallel = 1
        reasons.append(f"vLLM {machine.vllm.found.version} on the CPU: all is slow there.")
    else:
        gpus = _gpus(machine, options, set(ours), reasons)
        parallel = _parallel(model, gpus, options)
        groups = _groups(gpus, parallel)
        reasons += _words_for_gpus(gpus, machine.gpus, parallel, model)
    chosen = chosen or Chosen(options.arrangement)
    reasons += chosen.reasons
    if chosen.reasons and parallel > 1:
        reasons.append(f"  What is said of a GPU there holds for an engine on {parallel} GPUs.")
    roles = _roles(chosen.arrangement, len(groups), machine, reasons)
    if machine.is_cpu:
        _refuse_beyond_memory(model, len(roles), machine.memory)
    given = number_of(options.flags, "--max-num-batched-tokens")
    # on CPUs a model's context may be larger than such a step, which not every model allows
    usual: Mapping[Role, int | None] = {} if machine.is_cpu else chosen.chunks or CHUNKS
    plan = Plan(
        model,
        tuple(_engines(roles, groups, ports, before)),
        ports.take(EVENTS_PORT, _given(events_before)),
        threads=max(1, machine.cores // len(roles)) if machine.is_cpu else None,
        tensor_parallel=parallel,
        chunks={role: given or usual.get(role) for role in set(roles)},
        max_num_seqs=number_of(options.flags, "--max-num-seqs"),
        vendor=None if machine.is_cpu else machine.gpus.vendor,
    )
    return _with_reasons(plan, reasons, options)


def most_engines(
    machine: Machine, model: Model, options: UpOptions, ours: Iterable[int] = ()
) -> int:
    """Return how many engines can be started, whatever their roles.

    Raises:
        UpError: none.
    """
    if machine.is_cpu:
        return _cpu_engines(options)
    gpus = _gpus(machine, options, set(ours), [])
    return len(gpus) // _parallel(model, gpus, options)


def refuse_wrong(options: UpOptions) -> None:
    """Refuse options that are wrong on any machine.

    Raises:
        UpError: one sentence.
    """
    refuse_own(options.flags)
    arrangement = options.arrangement
    if options.load is not None:
        _refuse_load(options)
    parts = _PARTS.findall(arrangement)
    if arrangement in ("auto", "any"):
        return
    counts = {kind: int(count) for count, kind in parts}
    if (
        "".join(count + kind for count, kind in parts) != arrangement
        or not parts
        or len(counts) != len(parts)
        or not 0 < sum(counts.values()) <= MAX_ENGINES
    ):
        raise UpError(f"--arrangement: {_EXPECTED}, got {arrangement[:80]!r}", CANT_START)
    if bool(counts.get("P")) != bool(counts.get("D")):
        raise UpError(
            f"--arrangement: {arrangement} has engines for one half of a request only: prefill "
            f"engines (P) need decode engines (D)",
            CANT_START,
        )


def _refuse_load(options: UpOptions) -> None:
    """Refuse a load that has no effect."""
    if options.arrangement != "auto":
        why = f"--arrangement {options.arrangement[:80]} says which engines are started"
    elif not options.slo or options.profile is None:
        why = "needs --slo and --profile, by which the arrangement is chosen for a load"
    else:
        return
    given = {
        "--input-tokens": options.load and options.load.input_tokens,
        "--output-tokens": options.load and options.load.output_tokens,
        "--rate": options.load and options.load.rate,
    }
    name = next(name for name, value in given.items() if value is not None)
    raise UpError(f"{name}: {why}", CANT_START)


def _counts(arrangement: str) -> list[Role]:
    """Return the roles that an arrangement names by numbers."""
    return [_ROLES[kind] for count, kind in _PARTS.findall(arrangement) for _ in range(int(count))]


def _cpu_engines(options: UpOptions) -> int:
    if options.gpus is not None:
        raise UpError("--gpus: this vLLM is built for CPUs", CANT_START)
    if number_of(options.flags, "--tensor-parallel-size") not in (None, 1):
        raise UpError("--tensor-parallel-size: engines on a CPU have one rank", CANT_START)
    return len(_counts(options.arrangement)) or CPU_ENGINES


def _gpus(machine: Machine, options: UpOptions, ours: set[int], reasons: list[str]) -> list[Gpu]:
    """Return the GPUs to use: those that are asked for, else those that nobody uses."""
    if not machine.gpus.listed:
        raise UpError(
            f"vLLM {machine.vllm.found.version} is built for GPUs, and neither nvidia-smi nor "
            f"amd-smi finds one here: install vLLM's CPU build",
            CANT_START,
        )
    wanted = _wanted(machine, options)
    usable = []
    for gpu in wanted:
        used = None if gpu.index in ours else gpu.in_use
        why = used and f"it is in use by {used}"
        if gpu.divided is not None:
            why = f"it is divided ({gpu.divided})"
        if why is None:
            usable.append(gpu)
        elif options.gpus is not None:
            raise UpError(
                f"GPU {gpu.index} can't be used: {why}; choose others with --gpus", CANT_START
            )
        else:
            reasons.append(f"GPU {gpu.index} is left out: {why}.")
    if not usable:
        raise UpError(
            "no GPU is free: " + " ".join(reasons).rstrip(".").replace(". ", "; "), CANT_START
        )
    return usable


def _wanted(machine: Machine, options: UpOptions) -> Sequence[Gpu]:
    by_index = {gpu.index: gpu for gpu in machine.gpus.listed}
    if options.gpus is not None:
        missing = [index for index in options.gpus if index not in by_index]
        if missing:
            there = ", ".join(map(str, by_index))
            by = machine.gpus.vendor.program
            raise UpError(f"--gpus: there is no GPU {missing[0]}; {by} lists {there}", CANT_START)
        return [by_index[index] for index in options.gpus]
    if machine.visible is None:
        return machine.gpus.listed
    variable, text = machine.visible
    names = [name.strip() for name in text.split(",") if name.strip()]
    found = [
        gpu
        for name in names
        for gpu in machine.gpus.listed
        if name == str(gpu.index) or (len(name) >= 8 and gpu.uuid.startswith(name))
    ]
    if not found:
        raise UpError(f"{variable}={text[:80]} names none of this machine's GPUs", CANT_START)
    return found


def _parallel(model: Model, gpus: Sequence[Gpu], options: UpOptions) -> int:
    """Return the number of GPUs of an engine: the smallest power of two that holds the weights and
    a part more for KV.
    """
    given = number_of(options.flags, "--tensor-parallel-size")
    memory = min(gpu.memory for gpu in gpus) * _utilization(options.flags)
    needed = 0.0 if model.weights is None else model.weights * (1 + KV_SHARE)
    parallel = given or 1
    while given is None and parallel * memory < needed:
        parallel *= 2
    if parallel > len(gpus) or parallel * memory < needed:
        words = "" if model.weights is None else f"{model.size} and KV need "
        here = f"{len(gpus)} of {gib(min(gpu.memory for gpu in gpus))}"
        raise UpError(
            f"{model.name} does not fit: {words}{parallel} GPUs, and {here} are free", CANT_START
        )
    if model.heads is not None and model.heads % parallel:
        raise UpError(
            f"{model.name} has {model.heads} attention heads, which {parallel} GPUs can't share "
            f"out: give --tensor-parallel-size behind `--`",
            CANT_START,
        )
    return parallel


def _utilization(flags: Sequence[str]) -> float:
    text = value_of(flags, "--gpu-memory-utilization")
    try:
        share = UTILIZATION if text is None else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UpError(
            f"--gpu-memory-utilization: expected a share up to 1, got {str(text)[:80]!r}",
            CANT_START,
        )
    return share


def _groups(gpus: Sequence[Gpu], parallel: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each engine: neighbours, which share links."""
    indices = [gpu.index for gpu in gpus]
    return [
        tuple(indices[at : at + parallel]) for at in range(0, len(indices) - parallel + 1, parallel)
    ]


def _refuse_beyond_memory(model: Model, engines: int, memory: int) -> None:
    if model.weights is None:
        return
    needed = int(engines * model.weights * (1 + KV_SHARE))
    if needed > memory:
        raise UpError(
            f"{model.name} does not fit: {engines} engines with {model.size} and KV need "
            f"{gib(needed)}, and {gib(memory)} of memory are available",
            CANT_START,
        )


def _roles(arrangement: str, most: int, machine: Machine, reasons: list[str]) -> list[Role]:
    """Return the role of each engine. `most`: so many engines can be started."""
    roles = _counts(arrangement)
    has_nixl = "nixl" in machine.vllm.found.connectors
    if not roles and most == 1:
        reasons.append("One engine: it serves requests whole, and no KV moves.")
        return ["aggregated"]
    if not roles:
        roles = ["any"] * most
    if len(roles) > most:
        raise UpError(
            f"--arrangement: {arrangement} has {len(roles)} engines, and the free GPUs are enough "
            f"for {most}",
            CANT_START,
        )
    if not has_nixl and set(roles) - {"aggregated"}:
        raise UpError(
            f"vLLM {machine.vllm.found.version} has no NIXL beside it, which moves the KV: "
            f"`{machine.vllm.python} -m pip install nixl`, or --arrangement {most}A, which splits "
            f"nothing",
            CANT_START,
        )
    if len(roles) < most:
        reasons.append(f"{arrangement} leaves the GPUs of {most - len(roles)} engines unused.")
    return roles


def _engines(
    roles: Sequence[Role],
    groups: Sequence[tuple[int, ...]],
    ports: Ports,
    before: Sequence[PlannedEngine],
) -> Iterable[PlannedEngine]:
    counts: dict[Role, int] = {}
    known = {one.name: one for one in before}
    for role, gpus in zip(roles, groups, strict=False):
        number = counts[role] = counts.get(role, -1) + 1
        name = f"{role}-{number}"
        old = known.get(name)
        port = ports.take(FIRST_PORTS[role], _given(None if old is None else old.port))
        side = None
        if role != "aggregated":
            side = ports.take(FIRST_SIDE_PORT, _given(None if old is None else old.side_port))
        replay = ports.take(FIRST_REPLAY_PORT, _given(None if old is None else old.replay_port))
        yield PlannedEngine(name, role, gpus, port, side, replay)


def _given(port: int | None) -> Sequence[int]:
    return () if port is None else (port,)


# -- words


def _with_reasons(plan: Plan, reasons: Sequence[str], options: UpOptions) -> Plan:
    words = list(reasons)
    if "any" in plan.roles:
        words.append(
            "Engines of role any: for each request it is decided whether it is split, and where "
            "(placement auto)."
        )
        if not options.slo and options.profile is None:
            words.append(
                "Neither --slo nor --profile is given: TTFT and the engines' seconds are kept low."
            )
    elif plan.is_split:
        words.append("Every prompt that can be split is: prefill engines compute it.")
    for role, chunk in sorted(plan.chunks.items()):
        if chunk is not None:
            words.append(f"{role}: {chunk} tokens per step (--max-num-batched-tokens).")
    return replace(plan, reasons=tuple(words))


def _words_for_gpus(
    gpus: Sequence[Gpu], machine: Gpus, parallel: int, model: Model
) -> Iterable[str]:
    kinds = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    named = ", ".join(str(gpu.index) for gpu in gpus)
    yield f"GPUs {named}: {kinds}, {gib(min(gpu.memory for gpu in gpus))} each."
    indices = [gpu.index for gpu in gpus]
    pairs = [(one, two) for one in indices for two in indices if one < two]
    vendor, links = machine.vendor, machine.links
    slow = [pair for pair in pairs if not vendor.is_fast(links.get(pair))]
    if pairs and not slow:
        yield f"All are linked by {vendor.link} ({links[pairs[0]]})."
    elif pairs and links:
        one, two = slow[0]
        link = links.get((one, two), "not known")
        yield (
            f"GPUs {one} and {two} have no {vendor.link} ({link}): KV moves slower between them."
        )
    if model.weights is None:
        yield (
            f"The size of {model.name} is not known before vLLM has it: {parallel} GPU per engine."
        )
    else:
        source = ", by its config.json" if model.is_estimate else ""
        more = "one GPU holds" if parallel == 1 else f"{parallel} GPUs hold"
        yield (f"{model.name} has {model.size}{source}: {more} them and a quarter more for KV.")
