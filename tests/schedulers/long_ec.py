"""The schedulers of vLLM's EC connectors and the simulator's."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.connectors import ec_connector_of
from pdproxy_lab.sim.ec_connector import ROW_BYTES, WIDTH, EncoderOutput
from pdproxy_lab.sim.ec_cpu import ECCpu, FetchOutput
from pdproxy_lab.sim.ec_mooncake import PushOutput
from pdproxy_lab.sim.encoder import Encoder
from pdproxy_lab.sim.facts import (
    ECConnectorName,
    ECExtraConfig,
    ECRole,
    ECTransferConfig,
    SimFacts,
)
from pdproxy_lab.sim.memory import Attention, BlockPool
from pdproxy_lab.sim.request import (
    EngineDeadError,
    EngineRequest,
    Medium,
    Picture,
    SamplingParams,
)
from pdproxy_lab.sim.stats import Stats
from tests.schedulers.compare import SCRIPTS, followed
from tests.schedulers.scripts import Script, Step

ROWS = {"a": 4, "b": 20, "c": 64, "d": 64}
CAPACITY = 100
"""Rows that an engine with ECCPUConnector keeps."""
EXTRA = {
    "ec_cpu_bytes": CAPACITY * ROW_BYTES,
    "ec_enable_nixl": True,
    "push_wait_timeout_s": 60.0,
}
CASES: list[tuple[ECConnectorName, ECRole]] = [
    (connector, role)
    for connector in ("ECCPUConnector", "ECMooncakeConnector")
    for role in ("ec_producer", "ec_consumer", "ec_both")
    if (connector, role) != ("ECMooncakeConnector", "ec_both")  # it would never encode
]
Answers = list[list[dict[str, Any]]]
IDS = [f"t{number}" for number in range(6)]
ANSWERS = {"completed": "fetched", "tombstoned": "refused", "retryable": "unanswered"}


class Simulated:
    """A connector of the simulator, and the requests of one script."""

    def __init__(self, connector: ECConnectorName, role: ECRole) -> None:
        config = ECTransferConfig(
            ec_connector=connector,
            ec_role=role,
            ec_connector_extra_config=ECExtraConfig(**EXTRA),  # type: ignore[arg-type]
        )
        encodes = {"role": "encode", "connector": "none"} if role == "ec_producer" else {}
        facts = SimFacts(vision=True, ec_transfer_config=config, **encodes)  # type: ignore[arg-type]
        self._outbox: deque[Any] = deque()
        self._stats = Stats()
        self._connector = ec_connector_of(facts, self._stats, None, self._outbox)
        self._encoder = Encoder(self._stats, self._connector)
        self._pool = BlockPool(8, 16)
        self._requests: dict[str, ActiveRequest] = {}
        self._failed: set[str] = set()
        self._fetching: list[str] = []
        self._saved: list[str] = []

    def follow(self, script: Script) -> list[dict[str, Any]]:
        """Follow one script to its end or to the first death."""
        seen = []
        for step in script:
            stored = self._stats.encoder_outputs_stored
            try:
                found = getattr(self, step["do"])(step)
            except EngineDeadError:
                seen.append({"died": True})
                break
            asks = self._asks(self._stats.encoder_outputs_stored - stored)
            seen.append(found | {"asks": asks})
        return seen

    def _asks(self, stored: int) -> list[list[str]]:
        found = [["save"]] * stored
        while self._outbox:
            match self._outbox.popleft():
                case FetchOutput(identifier=name):
                    self._fetching.append(name)
                    found.append(["fetch", name])
                case PushOutput() as push:
                    found.append(["push", push.transfer_id, push.identifier, push.consumer])
        return sorted(found)

    def new(self, step: Step) -> dict[str, Any]:
        media, offset = [], 0
        for name, raw in step["media"]:
            rows = ROWS[name]
            picture = Picture(name, rows, 7 if raw else None, (1, 2, 2 * rows))
            media.append(Medium(offset, picture))
            offset += rows
        request = EngineRequest(
            id=step["id"],
            prompt=tuple(range(300, 300 + offset + 1)),
            media=tuple(media),
            sampling=SamplingParams(max_tokens=1),
        )
        self._requests[step["id"]] = ActiveRequest(
            request=request,
            attention=Attention(self._pool, 1),
            arrived=step["now"],
            tokens=list(request.prompt),
            salt=0,
            params=None,
            chance=None,
            ec_params=dict(step["params"] or {}),
        )
        return {}

    def admit(self, step: Step) -> dict[str, Any]:
        now = step["now"]
        if (one := self._requests.get(step["id"])) is None:  # it has failed
            return {}
        self._connector.tick(now)
        asked = one, step["computed"], self._encoder.outputs, now
        # again, as vLLM loads what was pushed in a step of its own
        ready = self._connector.ready(*asked) or self._connector.ready(*asked)
        self._failed |= self._connector.unavailable
        self._connector.unavailable.clear()
        if step["id"] in self._failed:
            self._connector.ended(self._requests.pop(step["id"]), now)
            return {"failed": True}
        loaded, encoded = self._stats.encoder_outputs_loaded, self._stats.encoder_inputs
        if ready:
            self._encoder.run(one, step["computed"], one.prompt)
        return {
            "ready": ready,
            "loaded": self._stats.encoder_outputs_loaded - loaded,
            "encoded": self._stats.encoder_inputs - encoded,
        }

    def finish(self, step: Step) -> dict[str, Any]:
        one = self._requests.pop(step["id"], None)
        return {} if one is None else {"items": self._connector.ended(one, step["now"])}

    def answer(self, step: Step) -> dict[str, Any]:
        if self._fetching:
            assert isinstance(self._connector, ECCpu)
            name = self._fetching.pop(0)
            more = [EncoderOutput(7, ROWS[name])] if step["kind"] == "completed" else []
            getattr(self._connector, ANSWERS[step["kind"]])(name, *more)
        return {}

    def grant(self, step: Step) -> dict[str, Any]:
        return {"granted": self._connector.granted(step["name"], "0.32.0 sim") is not None}

    def push(self, step: Step) -> dict[str, Any]:
        output = EncoderOutput(7, ROWS[step["name"]])
        self._connector.pushed(step["transfer_id"], step["name"], output, step["now"])
        return {}


def read(seen: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM has done as the simulator says it."""
    if "died" in seen:
        return {"died": True}
    asks = sorted(["save"] if one[0] == "save" else one for one in seen["asks"])
    return seen | {"asks": asks}


# -- scripts


def cpu_params(chance: random.Random, names: list[str]) -> dict[str, Any] | None:
    """What a request to a consumer with ECCPUConnector carries."""
    found: dict[str, Any] = {}
    for name in names:
        source: dict[str, Any] = {
            "item_indices": [0],
            "peer_host": "127.0.0.1",
            "peer_port": 5,
            "size_bytes": ROWS[name] * ROW_BYTES,
            "shape": [ROWS[name], WIDTH],
        }
        if chance.random() < 0.3:
            key = chance.choice(["peer_host", "peer_port", "size_bytes", "shape"])
            wrong = chance.choice([None, "x", 7, [ROWS[name]], [1, WIDTH]])
            source = {**source, key: wrong}
            if chance.random() < 0.5:
                del source[key]
        if chance.random() < 0.8:
            found[name] = source
    return chance.choice([found, found, found, found, None])


def mooncake_params(chance: random.Random, names: list[str]) -> dict[str, Any] | None:
    """What a request to an engine with ECMooncakeConnector carries."""
    items: list[Any] = [
        {"transfer_id": chance.choice(IDS), "mm_hash": chance.choice([None, name, name, "a"])}
        for name in names
    ]
    chance.shuffle(items)
    if chance.random() < 0.1:
        wrong: list[Any] = [items[1:], ["t"], [{}], 7]
        items = chance.choice(wrong)
    consumer = {"consumer_zmq": chance.choice(["tcp://127.0.0.1:7", "tcp://127.0.0.1:8"])}
    more = consumer if chance.random() < 0.7 else {}
    return chance.choice([{"ec_items": items, **more}] * 5 + [more, None])


def script(number: int, connector: ECConnectorName, role: ECRole) -> Script:
    """Return a random script."""
    chance = random.Random(f"{number} {connector} {role}")
    now, steps = 1000.0, list[Step]()
    waiting: dict[str, int] = {}
    own = {"ECCPUConnector": ["answer", "answer"], "ECMooncakeConnector": ["push", "push"]}
    kinds = ["new", "new", "admit", "admit", "admit", "admit", "finish"]
    if role != "ec_producer":
        kinds += own[connector]
    if role != "ec_consumer" and connector == "ECCPUConnector":
        kinds.append("grant")
    for place in range(chance.randint(5, 30)):
        now += chance.choice([0.0, 0.01, 1.3, 7.3, 31.1, 65.7, 151.3])
        do = chance.choice(kinds)
        step: Step = {"do": do, "now": now}
        if do == "new":
            names = [chance.choice(list(ROWS)) for _ in range(chance.randint(0, 3))]
            drawn = cpu_params if connector == "ECCPUConnector" else mooncake_params
            raw = 1.0 if role == "ec_producer" else 0.7
            step |= {
                "id": f"r{place}",
                "media": [[name, chance.random() < raw] for name in names],
                "params": drawn(chance, names),
            }
            waiting[step["id"]] = sum(ROWS[name] for name in names)
        elif do in ("admit", "finish"):
            if not waiting:
                continue
            name = chance.choice(sorted(waiting))
            step["id"] = name
            if do == "admit":
                step["computed"] = chance.choice([0, 0, 0, chance.randint(0, waiting[name])])
            else:
                del waiting[name]
        elif do == "answer":
            step["kind"] = chance.choice(["completed", "completed", *ANSWERS])
        elif do == "grant":
            step["name"] = chance.choice(list(ROWS))
        elif do == "push":
            step |= {"transfer_id": chance.choice(IDS), "name": chance.choice(list(ROWS))}
        steps.append(step)
    return steps


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], Answers]:
    """What vLLM's schedulers make of all scripts."""
    scripts = [
        {"connector": connector, "role": role, "steps": script(number, connector, role)}
        for connector, role in CASES
        for number in range(SCRIPTS)
    ]
    found = followed("real_ec.py", {"extra": EXTRA, "rows": ROWS, "scripts": scripts})
    return {
        case: found[place * SCRIPTS : (place + 1) * SCRIPTS] for place, case in enumerate(CASES)
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("connector", "role"), CASES)
def test_the_simulator_decides_as_vllm_s_scheduler(
    answers: dict[tuple[str, str], Answers], connector: ECConnectorName, role: ECRole
) -> None:
    found = []
    for number, answer in enumerate(answers[connector, role]):
        steps = script(number, connector, role)
        theirs, ours = [read(one) for one in answer], Simulated(connector, role).follow(steps)
        if theirs == ours:
            continue
        pairs = list(zip(theirs, ours, strict=False))
        place = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs) - 1)
        happened = "\n".join(f"  {step}" for step in steps[: place + 1])
        found.append(f"vLLM      {answer[place]}\nsimulated {ours[place]}\nafter\n{happened}")
    assert not found, "\n\n".join([f"{len(found)} scripts differ:", *found[:3]])
