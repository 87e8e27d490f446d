"""Engines with MoRIIO report the same to each other with vLLM's scheduler, worker, writer and
listener as in the simulator.
"""

# P in both modes and D in WRITE mode: what ends the wait of a request, what frees blocks and when,
# what is written, and which message ends a listener. That a transfer was written is reported once,
# as P's writer does it: the second time, D's core would die. A D that reads needs `mori` for every
# step of its worker: only its scheduler is compared, in `long_moriio`.

from __future__ import annotations

import random
from typing import Any, Literal

import pytest

from pdproxy_lab.sim.active import RequestState
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.moriio import Moriio, Report, WriteBlocks, Written
from pdproxy_lab.sim.moriio_params import MessageAddress
from tests.schedulers.compare import SCRIPTS, Comparison
from tests.schedulers.long_moriio import SILENT, name_of, of_moriio
from tests.schedulers.scripts import BLOCK, Script, Step
from tests.schedulers.simulated import Simulated

TIMEOUT = 30.0
Mode = Literal["READ", "WRITE"]


def reports(number: int, *, prefill: bool, write: bool) -> Script:
    """Return a random script of one engine; at its end all requests are over, and `defer_timeout`
    has passed once.
    """
    chance = random.Random(number)
    now, used = 1000.0, 1
    steps: Script = []
    waiting: dict[str, int] = {}
    running: dict[str, int] = {}
    transfers: dict[str, int] = {}
    written: set[str] = set()
    kinds = ["release", "release", "remote_blocks"] if prefill else ["write_done"]
    for place in range(chance.randint(6, 24)):
        now += chance.choice([0.0, 0.01, 1.0])
        what = chance.choice(
            ["new", "schedule", "schedule", "finish", "report", "report", "wait", "abort"]
        )
        if what == "new":
            name = f"cmpl-{number}-{place}-{named_always(chance)}-0-{chance.getrandbits(32):08x}"
            transfer = f"tx-{chance.getrandbits(32):08x}"
            waiting[name] = transfers[transfer] = chance.choice([1, 16, 17, 100])
            params = {
                "do_remote_decode": prefill,
                "do_remote_prefill": not prefill,
                "transfer_id": transfer,
            }
            params |= {"remote_engine_id": None, "remote_block_ids": None}
            steps.append(
                {"do": "new", "now": now, "id": name, "prompt": waiting[name], "params": params}
            )
        elif what == "schedule" and waiting:
            name = chance.choice(sorted(waiting))
            length = running[name] = waiting.pop(name)
            blocks = list(range(used, used + -(-length // BLOCK)))
            used += len(blocks)
            steps.append(
                {"do": "schedule", "now": now, "id": name, "computed": 0, "blocks": blocks}
            )
        elif what == "finish" and running and (prefill or not write):
            name = chance.choice(sorted(running))
            reason = chance.choice(["length", "length", "stop", "error"])
            steps.append(
                {
                    "do": "finish",
                    "now": now,
                    "id": name,
                    "reason": reason,
                    "computed": running.pop(name),
                }
            )
        elif what == "abort" and running and not prefill:
            name = chance.choice(sorted(running))
            steps.append(
                {
                    "do": "finish",
                    "now": now,
                    "id": name,
                    "reason": "abort",
                    "computed": running.pop(name),
                }
            )
        elif what == "report":
            transfer = chance.choice([*transfers, "tx-unknown"])
            kind = chance.choice(kinds)
            if chance.random() < 0.03:
                kind = chance.choice(["release", "remote_blocks", "write_done"])
            if kind == "write_done" and transfer in written:
                continue
            written |= {transfer} if kind == "write_done" else set()
            count = -(-transfers.get(transfer, 1) // BLOCK) + chance.choice([0, 0, 0, 0, -1, 2])
            theirs = list(range(500, 500 + max(count, 0)))
            steps.append(
                {"do": "report", "now": now, "kind": kind, "transfer": transfer, "blocks": theirs}
            )
        elif what == "wait":
            steps.append({"do": "wait", "now": now})
    for name, length in running.items():
        reason = "length" if prefill else "abort"
        steps.append({"do": "finish", "now": now, "id": name, "reason": reason, "computed": length})
    steps.append({"do": "wait", "now": now + TIMEOUT + 1})
    for transfer in sorted(transfers.keys() - written):
        kind = chance.choice(kinds)
        steps.append(
            {
                "do": "report",
                "now": now + TIMEOUT + 2,
                "kind": kind,
                "transfer": transfer,
                "blocks": [500] * 7,
            }
        )
    return steps


def named_always(chance: random.Random) -> str:
    """Return a part of a request's id that names both engines."""
    return next(name for name in iter(lambda: name_of(chance), None) if name)


class SimulatedReports(Simulated):
    """The simulator's side."""

    connector: Any

    def made(self, facts: SimFacts) -> Any:
        made = Moriio(facts, self.pool)
        made.address = MessageAddress("10.0.0.9", 1)
        self._named: dict[str, str] = {}
        self._aborted: set[str] = set()
        self._arrived: list[str] = []
        self._writes: list[list[int]] = []
        return made

    def new(self, step: Step) -> dict[str, Any]:
        self._named[step["params"]["transfer_id"]] = step["id"]
        return super().new(step)

    def finish(self, step: Step) -> dict[str, Any]:
        waits = self._requests[step["id"]].state is RequestState.LOADING
        super().finish(step)
        if waits:
            self._aborted.add(step["id"])
        return {}

    def schedule(self, step: Step) -> dict[str, Any]:
        super().schedule(step)
        return {}

    def report(self, step: Step) -> dict[str, Any]:
        """Take a message of another engine."""
        if step["kind"] == "write_done":
            self.connector.written(step["transfer"], (), ())
        else:
            self.connector.reported(
                step["kind"].removeprefix("remote_"), step["transfer"], step["blocks"]
            )
        return {}

    def asked(self, command: Any) -> list[Any]:
        match command:
            case WriteBlocks():
                self._writes.append(list(command.blocks))
                self.connector.wrote(command.transfer_id)
            case Written():
                self._arrived.append(command.request_id)
                if command.request_id in self._requests:
                    self._requests[command.request_id].state = RequestState.RUNNING
                self._aborted.discard(command.request_id)
            case Report(kind="blocks"):
                pass
            case _:
                raise AssertionError(command)
        return []

    def state(self, now: float) -> dict[str, Any]:
        found = {
            "writes": sorted(self._writes),
            "arrived": sorted(self._arrived),
            "kept": sorted({self._named[name] for name in self.connector.held} | self._aborted),
        }
        self._writes, self._arrived = [], []
        return found

    def _asks(self, now: float) -> list[Any]:
        super()._asks(now)
        return []


class Reports(Comparison):
    """vLLM's side."""

    connector = "MoRIIOConnector"
    program = "real_moriio.py"
    scheduler = (
        "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector:"
        "MoRIIOConnectorScheduler"
    )
    silent = SILENT

    def __init__(self, role: str, mode: Mode) -> None:
        facts = of_moriio(role, mode, defer_timeout=TIMEOUT)
        super().__init__(lambda: SimulatedReports(facts))
        self.role = role
        ports = {
            "proxy_port": "1",
            "proxy_ping_port": "2",
            "http_port": "3",
            "handshake_port": "4",
            "notify_port": "5",
        }
        self.extra = {  # type: ignore[misc]
            "proxy_ip": "127.0.0.1",
            **ports,
            "read_mode": mode == "READ",
            "defer_timeout": TIMEOUT,
        }

    def begin(self) -> None:
        self._kept: set[str] = set()
        self._waiting: set[str] = set()

    def _read(self, step: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
        if "meta" not in seen:
            return super()._read(step, seen)
        meta = seen["meta"]
        if step["do"] == "schedule" and seen["matched"][1]:
            self._waiting.add(step["id"])
        if step["do"] == "finish" and (seen["kept"] or step["id"] in self._waiting):
            self._kept.add(step["id"])
        self._kept -= {*meta["freed"], *meta["arrived"]}
        self._waiting -= {*meta["arrived"]}
        return {
            "asks": [],
            "writes": sorted(meta["writes"]),
            "arrived": meta["arrived"],
            "kept": sorted(self._kept),
        }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("role", "mode"), [("kv_producer", "READ"), ("kv_producer", "WRITE"), ("kv_consumer", "WRITE")]
)
def test_the_simulator_does_with_reports_what_vllm_does(role: str, mode: Mode) -> None:
    scripts = [
        reports(n, prefill=role == "kv_producer", write=mode == "WRITE") for n in range(SCRIPTS)
    ]
    found = Reports(role, mode).run(scripts)
    assert not found, "\n\n".join([f"{len(found)} scripts differ:", *found[:3]])
