"""`pdproxy check` with connector auto: what it is taken for and why, and that engines which could
crash are not asked.
"""

import json

from msgspec import json as msgspec_json
from msgspec import structs

from pdproxy.check import report
from pdproxy.settings.load import POOL, Flag
from tests.check.engines import Bench, Checked

AUTO = Flag("--connector", f"{POOL}connector", "auto")


async def checked(bench: Bench) -> Checked:
    return await bench.check(bench.settings(AUTO))


async def test_nixl_is_named_and_its_pairs_are_tried(bench):
    p, d = await bench.start("prefill"), await bench.start("decode")
    found = await checked(bench)
    assert found.codes == set()
    text = report.as_text(found.learned, found.findings, report.TextStyle())
    assert text.startswith("connector: nixl\n  prefill ")
    assert "transfer_mode" in text or "remote_engine_id" in text
    assert text.splitlines()[-1] == "ready: KV moves in 1 of 1 pairs"
    body = json.loads(report.as_json(found.learned, found.findings, strict=False))
    assert body["connector"]["name"] == "nixl"
    assert [line.split(":")[0] for line in body["connector"]["evidence"]] == [
        "prefill http",
        "decode http",
    ]
    assert bench.held == 0
    assert p.requests
    assert d.requests


async def test_a_connector_that_cant_be_told_is_an_error_and_nothing_is_generated(bench):
    p, d = (
        await bench.start("prefill", connector="shared"),
        await bench.start("decode", connector="shared"),
    )
    found = await checked(bench)
    finding = found["connector_unclear"]
    assert finding.level == "error"
    assert "the engines do not show which" in finding.says
    assert "lmcache-pd" in finding.remedy
    assert finding.where == (p.url, d.url)
    assert not p.requests
    assert not d.requests
    text = report.as_text(found.learned, found.findings, report.TextStyle())
    assert text.startswith("connector: unclear\n")
    assert "NOT READY: 1 error" in text
    assert (
        json.loads(report.as_json(found.learned, found.findings, strict=False))["connector"]["name"]
        is None
    )


async def test_engines_of_two_connectors(bench):
    await bench.start("prefill")
    await bench.start("decode", connector="none")
    finding = (await checked(bench))["connector_unclear"]
    assert "engines of different connectors" in finding.says
    assert "start all engines with one connector" in finding.remedy


async def test_a_connector_whose_pairs_are_tried_elsewhere(bench):
    for role in ("prefill", "decode"):
        await bench.start(role, connector="nixl-push")
    found = await checked(bench)
    assert found.codes == {"connector_not_tried"}
    assert (
        found["connector_not_tried"].remedy
        == "test the pairs with pdproxy conformance --connector nixl-push"
    )


async def test_a_pool_without_prefill_engines_has_no_connector(bench):
    await bench.start("decode")
    found = await checked(bench)
    assert found.learned.connector is None
    assert (
        msgspec_json.decode(report.as_json(found.learned, found.findings, strict=False))[
            "connector"
        ]
        is None
    )


async def test_pairs_are_tried_at_the_host_of_the_settings(bench):
    await bench.start("prefill", side_channel_host="203.0.113.9")
    await bench.start("decode", handshake_timeout=2.0)
    found = await bench.check(bench.settings())
    assert "side_channel" in found.codes
    settings = bench.settings()
    pool = structs.replace(settings.pool, remote_host="url")
    assert (await bench.check(structs.replace(settings, pools=(pool,)))).codes == set()
