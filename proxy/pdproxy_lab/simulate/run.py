"""Runs a simulation with several seeds, and shows them as `pdproxy bench` shows its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.compare import Cell, Row, Table, table_of
from pdproxy_lab.bench.report import text_of
from pdproxy_lab.bench.slo import BenchSlo
from pdproxy_lab.simulate.cluster import Cluster
from pdproxy_lab.simulate.load import Load
from pdproxy_lab.simulate.placements import MakePlacement
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import Record, Summary, record_of, summarise


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. `shapes`: the engines of each role; `policies`: the names of scheduling
    policies by role.

    `placement`: makes what decides for each request whether it is split, and where it runs; None:
    nothing does.
    """

    fleet: Fleet
    hardware: Hardware
    shapes: dict[Role, Shape]
    policies: dict[Role, str]
    load: Load
    slos: tuple[BenchSlo, ...] = ()
    placement: MakePlacement | None = None

    def __post_init__(self) -> None:
        """Refuse what has no time."""
        if self.fleet.any and self.placement is None:
            raise ValueError("engines of role any need a placement")
        if not self.hardware.speed:
            raise ValueError("speed must be above 0: with 0 nothing takes time")
        if not self.hardware.step_s(0, 1):
            raise ValueError("a decode step must take time")


def run(simulation: Simulation, seed: int) -> Summary:
    """Run one seed. The same seed gives the same result.

    Raises:
        ValueError: the load has too many requests.
    """
    cluster = Cluster(
        simulation.fleet,
        simulation.hardware,
        simulation.shapes,
        simulation.policies,
        simulation.placement,
    )
    cluster.run(simulation.load.calls(seed))
    return summarise(cluster, simulation.slos)


def run_all(
    simulation: Simulation,
    name: str,
    seeds: range,
    asked: Record,
    done: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """Run several seeds; `done` gets each record as soon as it is there."""
    records = []
    for seed in seeds:
        records.append(record_of(run(simulation, seed), name, seed, simulation.slos, asked))
        done(records[-1])
    return records


def text(records: Sequence[Record]) -> str:
    """Return the report of one simulation's runs, with a line feed at its end."""
    table = table_of(records)
    rows = [*table.rows, *_per_engine(records), *_uses(records)]
    return text_of(Table(table.names, tuple(rows)), records)


def _per_engine(records: Sequence[Record]) -> list[Row]:
    ours = [record["pdproxy"] for record in records]
    rows = [
        _row("throughput per engine", "req/s", 3, [one["throughput_per_engine"] for one in ours])
    ]
    for place, slo in enumerate(ours[0]["slos"]):
        values = [one["slos"][place]["goodput_per_engine"] for one in ours]
        rows.append(_row(f"good per engine: {slo['name']}", "req/s", 3, values))
    return rows


def _uses(records: Sequence[Record]) -> list[Row]:
    rows = []
    for role, use in records[0]["pdproxy"]["roles"].items():
        uses: list[dict[str, Any]] = [record["pdproxy"]["roles"][role] for record in records]
        name = f"{use['engines']} {role}"
        rows.append(_row(f"{name}: busy", "%", 1, [100 * one["busy"] for one in uses]))
        rows.append(
            _row(
                f"{name}: in steps with prefill",
                "%",
                1,
                [100 * one["with_prefill"] for one in uses],
            )
        )
        rows.append(
            _row(f"{name}: most KV memory in use", "%", 1, [100 * one["kv_peak"] for one in uses])
        )
        rows.append(
            _row(f"{name}: prompt tokens from the cache", "%", 1, [_cached(one) for one in uses])
        )
        if any(one["preemptions"] for one in uses):
            rows.append(_row(f"{name}: preemptions", "", 0, [one["preemptions"] for one in uses]))
    return rows


def _cached(use: dict[str, Any]) -> float:
    total = use["cached_tokens"] + use["prompt_tokens"]
    return 100 * use["cached_tokens"] / total if total else 0.0


def _row(title: str, unit: str, digits: int, values: Sequence[float]) -> Row:
    return Row(title, unit, digits, (Cell(median(values), min(values), max(values), len(values)),))
