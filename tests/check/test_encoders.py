"""Encoder engines that are wrong in one way each, or right: each is asked for one picture, and for
nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import json, structs

from pdproxy.check import report
from pdproxy.check.facts import Card, Encoding
from pdproxy.check.rules import judge
from pdproxy.settings.engines import Facts
from pdproxy_lab.sim.facts import ECExtraConfig, ECTransferConfig
from pdproxy_lab.sim.server import SimServer
from tests.check.engines import Bench, Checked
from tests.check.test_rules import P, engine, good

E = "http://10.0.0.3:8400"
CONNECTORS = {
    "example": "ECExampleConnector",
    "cpu": "ECCPUConnector",
    "mooncake": "ECMooncakeConnector",
}


def with_ec(folder: Path, connector: str = "example", role: str = "ec_producer") -> dict[str, Any]:
    """Facts of an engine that makes encoder outputs."""
    extra = ECExtraConfig(
        shared_storage_path=str(folder), ec_enable_nixl=True, ec_cpu_bytes=1 << 20
    )
    config = ECTransferConfig(
        ec_connector=CONNECTORS[connector],  # type: ignore[arg-type]
        ec_role=role,  # type: ignore[arg-type]
        ec_port=0,
        ec_connector_extra_config=extra,
    )
    return {"vision": True, "connector": "none", "ec_transfer_config": config}


async def checked(bench: Bench, encoder: SimServer, connector: str = "example") -> Checked:
    """A good pair, and an engine that the settings have for its encoder engine."""
    await bench.start("prefill", vision=True)
    await bench.start("decode", vision=True)
    settings = bench.settings()
    nodes = [
        structs.replace(node, role="encode")
        if node.url == encoder.url
        else structs.replace(node, facts=Facts(ec_address="127.0.0.1:14579"))
        if node.role == "prefill" and connector == "mooncake"
        else node
        for node in settings.pool.nodes
    ]
    pool = structs.replace(settings.pool, nodes=tuple(nodes), ec_connector=connector)
    return await bench.check(structs.replace(settings, pools=(pool,)))


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_good_encoder_engine_is_asked_for_one_picture(
    bench: Bench, tmp_path: Path, connector: str
) -> None:
    """It is told of no engine that could use the output."""
    encoder = await bench.start("encode", **with_ec(tmp_path, connector))
    found = await checked(bench, encoder, connector)
    assert found.findings == []
    assert encoder.engine.stats.encoder_inputs == 1
    (asked,) = [one for one in encoder.requests if "completions" in one.path]
    sent = json.decode(asked.body)
    (message,) = sent.pop("messages")
    assert [part["type"] for part in message["content"]] == ["image_url"]
    assert sent == {"model": encoder.facts.model, "max_tokens": 1, "stream": False}
    text = report.as_text(found.learned, [], report.TextStyle())
    assert [line for line in text.splitlines() if "encodes pictures" in line] == [
        line for line in text.splitlines() if encoder.url in line
    ]
    body = json.decode(report.as_json(found.learned, [], strict=False))
    assert [one["encodes"] for one in body["engines"]] == [True, None, None]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"connector": "none"}, "it answered 400: "),
        ({"connector": "none", "vision": True}, "the answer has no ec_transfer_params"),
    ],
)
async def test_an_engine_that_is_no_encoder(bench: Bench, facts: dict[str, Any], says: str) -> None:
    """One without vision, one without an EC connector."""
    encoder = await bench.start("aggregated", **facts)
    found = await checked(bench, encoder)
    assert found.codes == {"encodes_nothing"}
    finding = found["encodes_nothing"]
    assert (finding.level, finding.where) == ("error", (encoder.url,))
    assert says in finding.says
    assert "--ec-transfer-config" in finding.remedy
    body = json.decode(report.as_json(found.learned, found.findings, strict=False))
    assert [one["encodes"] for one in body["engines"]] == [False, None, None]


async def test_an_engine_that_also_generates(bench: Bench, tmp_path: Path) -> None:
    encoder = await bench.start("aggregated", **with_ec(tmp_path, role="ec_both"))
    found = await checked(bench, encoder)
    assert {one.code: one.level for one in found.findings} == {"encoder_generates": "warning"}


async def test_a_decode_engine_may_make_outputs_too(bench: Bench, tmp_path: Path) -> None:
    both = structs.replace(with_ec(tmp_path)["ec_transfer_config"], ec_role="ec_both")
    await bench.start("prefill", vision=True)
    await bench.start("decode", vision=True, ec_transfer_config=both)
    assert (await bench.check()).findings == []


@pytest.mark.parametrize(
    ("connector", "facts", "found"),
    [
        ("example", {}, {}),
        ("example", {"cards": (Card("qwen"),)}, {"encoder_models_differ": "error"}),
        ("example", {"cards": (Card("llama"), Card("more"))}, {}),
        ("example", {"cards": (), "encoding": None}, {"no_model": "error"}),
        ("example", {"version": "0.33.0"}, {"encoder_versions_differ": "warning"}),
        ("cpu", {"version": "0.33.0"}, {"encoder_versions_differ": "error"}),
        ("example", {"clock_skew": 60.0}, {"clock": "warning"}),
        ("example", {"restarted": True}, {"engine_changed": "error"}),
    ],
)
def test_an_encoder_engine_is_as_those_that_use_its_outputs(
    connector: str, facts: dict[str, Any], found: dict[str, str]
) -> None:
    learned = good()
    pool = structs.replace(learned.settings.pool, ec_connector=connector)
    learned.settings = structs.replace(learned.settings, pools=(pool,))
    learned.engines += [engine(E, "encode", **{"encoding": Encoding(), "completions": (), **facts})]
    findings = judge(learned)
    assert {one.code: one.level for one in findings} == found
    for finding in findings:
        expected = (E, P) if finding.code == "encoder_versions_differ" else (E,)
        assert finding.where == expected
