"""Requests on the token-level simulator in virtual time, behind the same scheduling: what the fast
engines must match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy_lab.sim.facts import Role as SimRole
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.request import EngineOutput, EngineRequest, SamplingParams
from pdproxy_lab.sim.virtual import VirtualCluster, VirtualEngine
from pdproxy_lab.simulate.cluster import TEXT_BYTES, Call
from pdproxy_lab.simulate.records import RequestTimes
from pdproxy_lab.simulate.shape import Fleet, Shape

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_ROLES: dict[Role, SimRole] = {
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
    Role.AGGREGATED: "aggregated",
}


def prompt_of(call: Call, unit: int) -> tuple[int, ...]:
    """Return token ids with the prefix structure of a call's keys; the rest is its own."""
    ids: list[int] = []
    for key in call.keys:
        ids += [1_000_000 + key * unit + place for place in range(unit)]
    rest = call.prompt - len(ids)
    ids += [-1_000_000 * (call.number + 1) - place for place in range(rest)]
    return tuple(ids[: call.prompt])


class TokenLevel:
    """A cluster of `sim.core` engines with a ledger. `run` serves calls; `gaps` are all gaps
    between two tokens.
    """

    def __init__(self, fleet: Fleet, hardware: Hardware, shape: Shape) -> None:
        self.cluster = VirtualCluster()
        self.hardware, self.shape = hardware, shape
        counts = {
            Role.PREFILL: fleet.prefill,
            Role.DECODE: fleet.decode,
            Role.AGGREGATED: fleet.aggregated,
        }
        specs = [
            EngineSpec(f"{role.value}-{i}", role)
            for role, count in counts.items()
            for i in range(count)
        ]
        self.engines: dict[str, VirtualEngine] = {
            spec.url: self.cluster.add(self._facts(spec.role)) for spec in specs
        }
        self.ledger = Ledger(specs, LedgerOptions(breaker_failures=3, breaker_cooldown=10.0))
        for spec in specs:
            self.ledger.mark_up(
                spec.url, Evidence(frozenset({"m"}), "", shape.block_size, (), 0, 1.0)
            )
        self.records = RequestTimes()
        self.gaps: list[float] = []
        self._meet()

    def _meet(self) -> None:
        """Have each decode engine pull once from each prefill engine: the first transfer of two
        engines needs a handshake.
        """
        decodes = [engine for url, engine in self.engines.items() if url.startswith("decode")]
        prefills = [engine for url, engine in self.engines.items() if url.startswith("prefill")]
        for index, (prefill, decode) in enumerate((p, d) for p in prefills for d in decodes):
            ids = tuple(50_000 + index * 64 + place for place in range(2 * self.shape.block_size))

            def met(
                output: EngineOutput,
                now: float,
                ids: tuple[int, ...] = ids,
                decode: VirtualEngine = decode,
            ) -> None:
                handle = output.kv_transfer_params
                self.cluster.submit(
                    decode, _request(f"met-{ids[0]}", ids, 1, handle), lambda *_: None
                )

            self.cluster.submit(prefill, _request(f"meet-{ids[0]}", ids, 1, PREFILL), met)
            self.cluster.run()
        self.start = self.cluster.now

    def _facts(self, role: Role) -> SimFacts:
        shape = self.shape
        return SimFacts(
            role=_ROLES[role],
            block_size=shape.block_size,
            num_gpu_blocks=shape.blocks + 1,
            max_model_len=shape.kv_tokens - shape.block_size,
            max_num_seqs=min(shape.max_num_seqs, shape.max_num_batched_tokens),
            max_num_batched_tokens=shape.max_num_batched_tokens,
            enable_prefix_caching=shape.enable_prefix_caching,
            hardware=self.hardware,
            kv_lease_duration=1e6,
            heartbeat_interval=1e6,
        )

    def run(self, calls: Sequence[Call]) -> RequestTimes:
        """Serve all calls."""
        for call in calls:
            self.cluster.at(self.start + call.due, partial(self._arrived, call))
        self.cluster.run()
        return self.records

    def _arrived(self, call: Call) -> None:
        now = self.cluster.now - self.start
        self.records.arrived(call.number, call.due, call.prompt, call.output)
        ask = Ask("m", call.prompt * TEXT_BYTES, now)
        both = self.ledger.assign((Role.PREFILL, Role.DECODE), ask)
        if both is not None:
            call.prefill_lease, call.lease = both.leases
            first = both.leases[0]
            self._later(self.hardware.before_engine_s, lambda: self._prefill(call, first))
            return
        call.lease = self.ledger.assign_alone(ask)
        self._later(self.hardware.before_engine_s, lambda: self._answer(call, None))

    def _prefill(self, call: Call, lease: Lease) -> None:
        prompt = prompt_of(call, self.shape.unit_tokens)

        def made(output: EngineOutput, now: float) -> None:
            handle = output.kv_transfer_params
            assert handle is not None

            def decode() -> None:
                self.ledger.close(lease, Verdict.GOOD, now)
                self._answer(call, handle)

            self._later(self.hardware.between_engines_s, decode)

        self.cluster.submit(
            self.engines[lease.engine.url], _request(f"p-{call.number}", prompt, 1, PREFILL), made
        )

    def _answer(self, call: Call, handle: dict[str, object] | None) -> None:
        assert call.lease is not None
        lease, times = call.lease, []
        prompt = prompt_of(call, self.shape.unit_tokens)

        def token(output: EngineOutput, now: float) -> None:
            times.append(now - self.start)
            if output.finish_reason is None:
                return
            late = self.hardware.to_client_s
            gaps = [after - before for before, after in pairwise(times)]
            self.gaps += gaps
            self.records.ended(
                call.number, times[0] + late, times[-1] + late, max(gaps, default=0.0)
            )
            self._later(late, lambda: self.ledger.close(lease, Verdict.GOOD, self.cluster.now))

        request = _request(f"d-{call.number}", prompt, call.output, handle)
        self.cluster.submit(self.engines[lease.engine.url], request, token)

    def _later(self, seconds: float, what: Callable[[], object]) -> None:
        def due() -> None:
            what()

        self.cluster.at(self.cluster.now + seconds, due)


def _request(name: str, prompt: tuple[int, ...], output: int, params: object) -> EngineRequest:
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    handle = dict(params) if isinstance(params, dict) else None
    return EngineRequest(id=name, prompt=prompt, sampling=sampling, kv_transfer_params=handle)
