"""Runs a simulation with several seeds, and shows them as `pdproxy bench` shows its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec

from pdproxy.engine_model.fitted import FittedRanges, Ranges, extrapolated
from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.compare import Cell, Row, Table, table_of
from pdproxy_lab.bench.report import text_of
from pdproxy_lab.bench.slo import BenchSlo
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.load import Load
from pdproxy_lab.simulate.placements import MakePlacement
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import Record, Summary, record_of, summarise

PORTION = 100
"""Requests between two reports of the progress."""


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


def run(
    simulation: Simulation, seed: int, on_request: Callable[[int], None] | None = None
) -> Summary:
    """Run one seed. The same seed gives the same result. `on_request`: gets the number of requests
    that came, after each `PORTION` of them.

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
    calls = simulation.load.calls(seed)
    cluster.run(calls if on_request is None else _counted(calls, on_request))
    return summarise(cluster, simulation.slos)


def _counted(calls: Iterable[Call], on_request: Callable[[int], None]) -> Iterator[Call]:
    for number, call in enumerate(calls, 1):
        if number % PORTION == 0:
            on_request(number)
        yield call


def run_all(
    simulation: Simulation,
    name: str,
    seeds: range,
    asked: Record,
    done: Callable[[Record], None] = lambda _: None,
    on_request: Callable[[int], None] | None = None,
) -> list[Record]:
    """Run several seeds; `done` gets each record as soon as it is there. `on_request`: as in
    `run`.
    """
    records = []
    for seed in seeds:
        summary = run(simulation, seed, on_request)
        records.append(record_of(summary, name, seed, simulation.slos, asked))
        done(records[-1])
    return records


def text(records: Sequence[Record], fitted: FittedRanges | None = None) -> str:
    """Return the report of one simulation's runs, with a line feed at its end. `fitted`: what the
    profile was fitted to.
    """
    table = table_of(records)
    rows = [*table.rows, *_per_engine(records), *_uses(records)]
    asked = Ranges()
    for record in records:
        asked = asked.with_(Ranges(**record["pdproxy"]["asked_of_engines"]))
    beyond = extrapolated(fitted, asked)
    warning = [] if beyond is None else ["", *beyond.lines]
    return text_of(Table(table.names, tuple(rows)), records) + "".join(
        f"{one}\n" for one in warning
    )


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
