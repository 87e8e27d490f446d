"""`pdproxy bench --profile`: the requests of a bench once more, on one virtual engine with a
profile.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdproxy_lab.cli.load_options import as_settings_error

if TYPE_CHECKING:
    from pdproxy_lab.bench.session import Load
    from pdproxy_lab.bench.slo import BenchSlo
    from pdproxy_lab.simulate.run import Simulation


def simulation_of(name: str, measured: Load, slos: tuple[BenchSlo, ...]) -> Simulation:
    """Return one plain engine with a profile, and the load of a bench.

    Raises:
        SettingsError: the profile can't be used.
    """
    from pdproxy.engine_model.profile import load
    from pdproxy.scheduling.ledger_engine import Role
    from pdproxy_lab.simulate.load import Given
    from pdproxy_lab.simulate.run import Simulation
    from pdproxy_lab.simulate.shape import Fleet, Shape

    with as_settings_error("--profile: "):
        profile = load(name)
        limits = profile.engine
        shape = Shape(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            kv_tokens=limits.block_size * limits.num_gpu_blocks,
            block_size=limits.block_size,
        )
        return Simulation(
            fleet=Fleet(aggregated=1),
            hardware=profile.hardware,
            shapes=dict.fromkeys(Role, shape),
            policies={Role.PREFILL: "least_load", Role.DECODE: "least_load"},
            load=Given(plan=measured.plan),
            slos=slos,
        )


def records_of(
    simulation: Simulation, name: str, seeds: range, rate: float | None
) -> list[dict[str, Any]]:
    """Run the seeds of a bench and return a record of each, with the profile's name as that of the
    server. `rate`: of the load, in requests per second.

    Raises:
        SettingsError: the engine can't serve the load.
    """
    from pdproxy_lab.simulate.run import run_all

    with as_settings_error("--profile: "):
        found = run_all(simulation, f"profile {Path(name).stem}"[:32], seeds, {"profile": name})
    return [{"request_rate": rate, **record} for record in found]
