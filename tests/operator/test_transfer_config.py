"""What engines are told about moving KV."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy_operator.errors import ConfigError
from pdproxy_operator.transfer_config import transfer_config
from tests.operator.resources import runtime

EXTRA = {"kv_connector_extra_config": {"a": 1}}


@pytest.mark.parametrize(
    ("role", "more", "expected"),
    [
        ("prefill", {}, {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}),
        ("decode", {}, {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}),
        ("any", {}, {"kv_connector": "NixlConnector", "kv_role": "kv_both"}),
        (
            "decode",
            {"connector": "nixl-push", "kvTransferConfig": EXTRA},
            {"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer", **EXTRA},
        ),
        (
            "prefill",
            {"connector": "mooncake"},
            {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"},
        ),
        (
            "any",
            {"connector": "shared", "kvTransferConfig": {"kv_connector": "X"}},
            {"kv_connector": "X", "kv_role": "kv_both"},
        ),
        ("aggregated", {}, None),
        ("prefill", {"connector": "custom"}, None),
        ("decode", {"simulated": True}, None),
    ],
)
def test_the_flag_is_by_role_and_connector(
    role: str, more: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert transfer_config(runtime("r", role, **more).spec) == expected


def test_shared_storage_has_no_connector_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"connector shared needs kvTransferConfig\.kv_connector"):
        transfer_config(runtime("r", "prefill", connector="shared").spec)
