"""Routes of an engine whose core has died, and links that ask it."""

import asyncio

import msgspec
import pytest

from pdproxy_lab.sim.cpu_link import CpuLink, _Question
from pdproxy_lab.sim.facts import CpuBuffer, SimFacts
from pdproxy_lab.sim.frame_port import receive_frame, send_frame
from pdproxy_lab.sim.network import Sockets
from pdproxy_lab.sim.request import EngineDeadError
from tests.fakes.ports import free_port
from tests.sim.raw import ask, post


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})],
    ids=["tokenize", "detokenize"],
)
async def test_prompts_are_not_tokenized_by_a_dead_engine(sim, path, body):
    sim.engine.kill_core()
    answer = (await ask(sim.port, post(path, **body))).answer
    assert answer.status == 500
    assert msgspec.json.decode(answer.body)["error"]["message"] == str(EngineDeadError())
    assert sim.crashes == []


async def test_a_cpu_link_of_a_dead_core_closes_the_connection(caplog):
    """What is asked over it has no answer, and nothing fails in the background."""

    def dead():
        raise EngineDeadError

    port = free_port()
    facts = SimFacts(role="decode", connector="cpu", cpu=CpuBuffer(cpu_port=port), model="tiny")
    link = CpuLink(facts, dead, lambda: None, Sockets().reserved_port())
    await link.open("engine")
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        part = {"request": "a", "start": 0, "stop": 1, "total": 1, "pages": [], "size": 1}
        send_frame(writer, msgspec.convert({"engine_id": "engine", "part": part}, _Question))
        with pytest.raises(EOFError):
            await receive_frame(reader)
        writer.close()
    finally:
        await link.close()
        link.release()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
