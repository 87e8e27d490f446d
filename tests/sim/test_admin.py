"""The admin port of a simulated engine."""

import pytest

from pdproxy_lab.sim.server import SimServer
from tests.sim.moments import FAST
from tests.sim.raw import ask, completion, get, post


@pytest.fixture
async def sim():
    async with SimServer(FAST, admin_port=0, chance=7) as made:
        yield made
        assert not made.crashes


def delete(path):
    return f"DELETE {path} HTTP/1.1\r\nhost: sim\r\n\r\n".encode()


async def admin(sim, data):
    return (await ask(int(sim.admin_url.rpartition(":")[2]), data)).answer


async def test_faults_are_armed_listed_and_disarmed(sim):
    armed = await admin(sim, post("/faults", kind="status", at="queued", next=2, status=503))
    assert (armed.status, armed.json["id"], armed.json["args"]["status"]) == (201, 1, 503)
    await admin(sim, post("/faults", kind="reset", rate=0.5, args={}))
    assert (await ask(sim.port, completion())).answer.status == 503
    listed = (await admin(sim, get("/faults"))).json
    assert [(one["id"], one["kind"], one["left"], one["fired"]) for one in listed["armed"]] == [
        (1, "status", 1, 1),
        (2, "reset", None, 0),
    ]
    assert listed["happened"] == {"status@queued": 1}
    assert (await admin(sim, delete("/faults/1"))).status == 204
    assert list(sim.faults.armed) == [2]
    assert "no fault 1" in (await admin(sim, delete("/faults/1"))).json["error"]
    await admin(sim, delete("/faults"))
    assert not sim.faults.armed


@pytest.mark.parametrize(
    ("data", "status", "named"),
    [
        (post("/faults", kind="nonsense"), 400, "nonsense"),
        (post("/faults", at="queued"), 400, "kind is missing"),
        (post("/faults", kind="reset", at="never"), 400, "never"),
        (post("/faults", kind="reset", at=7), 400, "7"),
        (post("/faults", kind="reset", next=[]), 400, "next"),
        (post("/faults", kind="reset", args=3), 400, "args"),
        (post("/faults", kind=["reset"]), 400, "kind"),
        (post("/faults", kind="status", status="x"), 400, "status"),
        (post("/faults", kind="status", status=None), 400, "status"),
        (b"POST /faults HTTP/1.1\r\nhost: sim\r\ncontent-length: 1\r\n\r\n{", 400, "not JSON"),
        (b"POST /faults HTTP/1.1\r\nhost: sim\r\ncontent-length: 2\r\n\r\n[]", 400, "an object"),
        (get("/nowhere"), 404, "/nowhere"),
        (get("/kill"), 405, "/kill"),
        (delete("/faults/99"), 404, "99"),
    ],
)
async def test_the_admin_port_names_what_is_wrong(sim, data, status, named):
    answer = await admin(sim, data)
    assert answer.status == status
    assert named in answer.json["error"]
    assert not sim.faults.armed


async def test_the_admin_port_commands_life_and_death(sim):
    lives = []
    for order in ("freeze", "thaw", "terminate", "restart", "kill", "restart"):
        lives.append((await admin(sim, post(f"/{order}"))).json["life"])
    assert lives == ["frozen", "up", "terminated", "up", "down", "up"]
    assert (await ask(sim.port, completion())).answer.status == 200


async def test_the_admin_port_stops_the_core_alone(sim):
    states = [(await admin(sim, post(f"/{order}"))).json for order in ("freeze_core", "thaw_core")]
    assert [(state["life"], state["core_frozen"]) for state in states] == [
        ("up", True),
        ("up", False),
    ]
    assert (await ask(sim.port, completion())).answer.status == 200


async def test_the_admin_port_looks_inside():
    async with SimServer(FAST, admin_port=0) as sim:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        await ask(sim.port, completion(max_tokens=1, kv_transfer_params=params))
        state = (await admin(sim, get("/state"))).json
        assert state["engine_id"] == sim.engine.engine_id
        assert (state["life"], state["dead"], state["running"], state["waiting"]) == (
            "up",
            False,
            0,
            0,
        )
        ((name, left),) = state["handles"].items()
        assert name.startswith("cmpl-")
        assert 0 < left <= 30
        assert 0 < state["kv_cache_usage"] <= 1
        assert (await admin(sim, post("/expire_leases"))).json["handles"] == {}
        assert (await admin(sim, post("/kill_core"))).json["dead"]


async def test_an_engine_without_an_admin_port_has_no_url():
    assert SimServer(FAST).admin_url is None
