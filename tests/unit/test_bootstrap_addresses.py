"""Where a stage configuration puts Mooncake's bootstrap servers, and what each leg is then sent of
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdproxy.settings.load import POOL, EngineFlag, Flag
from pdproxy.transfer.contract import Dispatch, Handle
from pdproxy.transfer.mooncake import ENTRY
from pdproxy.transfer.peers import Peer
from pdproxy.wire.engine import prefill_answer
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from tests.unit.test_stages import kv, pool, refusal, stage, write

P, D = EngineFlag("prefill", "10.0.0.1:8100"), EngineFlag("decode", "10.0.0.2:8200")
MOONCAKE = "MooncakeConnector"
COMPLETION = parse(
    Route.COMPLETIONS,
    b'{"prompt":"a b","model":"m","max_tokens":9,"stop":["x"],"stop_token_ids":[7]}',
)
CONTRACT = ENTRY.build(ENTRY.options())


def bootstraps(tmp_path: Path, *stages: Any) -> list[str | None]:
    """The bootstrap servers of a file's engines."""
    return [engine.facts.bootstrap for engine in pool(write(tmp_path, *stages), P, D).nodes]


@pytest.mark.parametrize(
    ("extra", "address"),
    [
        ({}, "http://10.0.0.1:8998"),
        ({"mooncake_bootstrap_port": 25201}, "http://10.0.0.1:25201"),
        ({"bootstrap_server_address": "external:12345"}, "http://external:12345"),
        ({"bootstrap_server_address": "[::1]:12345"}, "http://[::1]:12345"),
        (
            {"bootstrap_server_address": "127.0.0.1:25201", "mooncake_bootstrap_port": 1},
            "http://127.0.0.1:25201",
        ),
    ],
    ids=str,
)
def test_the_server_of_a_stage(tmp_path: Path, extra: dict[str, Any], address: str) -> None:
    own = kv(kv_connector=MOONCAKE, kv_connector_extra_config=extra)
    assert bootstraps(
        tmp_path, stage("prefill", **own), stage("decode", **kv(kv_connector=MOONCAKE))
    ) == [
        address,
        None,
    ]


@pytest.mark.parametrize(
    "address", [":12345", "host:0", "host:65536", "host", "http://host:1", "host:1/x"]
)
def test_an_address_that_is_none(tmp_path: Path, address: str) -> None:
    own = kv(kv_connector=MOONCAKE, kv_connector_extra_config={"bootstrap_server_address": address})
    path = write(tmp_path, stage("prefill", **own), stage("decode", **kv(kv_connector=MOONCAKE)))
    said = refusal(lambda: pool(path, P, D))
    assert "facts.bootstrap" in said or "bootstrap_server_address" in said


def test_only_the_stage_of_the_pair_is_asked(tmp_path: Path) -> None:
    """In a pipeline of four: the stages of speech have no KV for anybody."""
    own = kv(kv_connector=MOONCAKE, kv_connector_extra_config={"mooncake_bootstrap_port": 25201})
    talker = stage(None, 30, engine_input_source=[20])
    wave = stage(None, 40, engine_input_source=[30])
    stages = (
        stage("prefill", 10, **own),
        stage("decode", 20, engine_input_source=[10], **own),
        talker,
        wave,
    )
    assert bootstraps(tmp_path, *stages) == ["http://10.0.0.1:25201", None]


def test_without_a_pair_nobody_has_a_server(tmp_path: Path) -> None:
    path = write(tmp_path, stage(None, 0), stage(None, 1, engine_input_source=[0]))
    found = pool(path, P, D, flags=(Flag("--connector", f"{POOL}connector", "nixl"),))
    assert [engine.facts.bootstrap for engine in found.nodes] == [None, None]


def test_the_legs_of_a_pair(tmp_path: Path) -> None:
    """P ends by length whatever the client stops at, and is told to keep; D has the client's own
    request, and fetches.
    """
    own = kv(
        kv_connector=MOONCAKE,
        kv_connector_extra_config={"bootstrap_server_address": "127.0.0.1:25201"},
    )
    (address, _) = bootstraps(
        tmp_path, stage("prefill", **own), stage("decode", **kv(kv_connector=MOONCAKE))
    )
    dispatch = Dispatch("req-1", prefill_peer=Peer(engine_id="e", address=address))
    prompt = COMPLETION.prompts[0]
    p = json.loads(CONTRACT.prefill(COMPLETION, prompt, dispatch).body)
    assert (p["max_tokens"], p["stop"], p["stop_token_ids"]) == (1, [], [])
    assert (
        p["kv_transfer_params"]["do_remote_decode"],
        p["kv_transfer_params"]["do_remote_prefill"],
    ) == (True, False)
    assert p["kv_transfer_params"]["transfer_id"] == "xfer-req-1"
    answer = prefill_answer(
        b'{"choices":[{"index":0,"finish_reason":"length","prompt_token_ids":[1,2]}],"usage":'
        b'{"prompt_tokens":2}}'
    )
    assert answer is not None
    given = CONTRACT.handle(COMPLETION, answer, dispatch)
    assert isinstance(given, Handle)
    d = json.loads(CONTRACT.decode(COMPLETION, prompt, given, dispatch).body)
    params = d.pop("kv_transfer_params")
    assert d == json.loads(
        b'{"prompt":"a b","model":"m","max_tokens":9,"stop":["x"],"stop_token_ids":[7]}'
    )
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (False, True)
    assert (params["remote_bootstrap_addr"], params["transfer_id"]) == (
        "http://127.0.0.1:25201",
        "xfer-req-1",
    )
    assert json.loads(bytes(COMPLETION.fields["stop"])) == ["x"], (
        "the client's request is not changed"
    )
