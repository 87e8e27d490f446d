"""What the last release has, this version has, too; each kind of broken promise is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.release import description, promises

NOW = description.described()


def test_this_version_keeps_what_was_released() -> None:
    found = promises.broken(description.released(), NOW)
    assert not found, "\n".join(
        [*found, "Only a new major version may do so: docs/reference/compatibility.md"]
    )


def test_what_is_described_is_all_that_there_is() -> None:
    """A part that describes nothing would promise nothing."""
    assert NOW["settings"]["listen.port"]["default"] == 8000
    assert NOW["settings"]["pools[].nodes[].role"]["accepts"]["enum"]
    assert NOW["metrics"]["pdproxy_requests_total"]["labels"]["outcome"]
    assert NOW["log_fields"]["request"]["status"] == "number"
    assert NOW["log_fields"]["leg failed"]["will_retry"] == "boolean"
    engines = NOW["admin_api"]["GET /admin/v1/engines"]
    assert engines["gives"]["200 engines[].health.state"]["required"]
    assert engines["takes"]["query pool"] == {"accepts": {"type": "string"}, "required": False}
    assert NOW["command_line"]["pdproxy check"]["exit_codes"] == [0, 1, 2]
    assert NOW["routes"]["POST /v1/chat/completions"] == {"audience": "clients", "gives": {}}


def edited(path: str, value: Any = None) -> Callable[[dict[str, Any]], None]:
    """Return what changes the value at a path, `a/b/c`; what removes it, if there is none."""

    def edit(tree: dict[str, Any]) -> None:
        *above, last = path.split("|")
        for name in above:
            tree = tree[name]
        if value is None:
            del tree[last]
        else:
            tree[last] = value

    return edit


PORT = "settings|listen.port"
ENGINES = "admin_api|GET /admin/v1/engines"
DRAIN = "admin_api|POST /admin/v1/engines/{name}/drain"


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (edited(PORT), "the setting listen.port is gone"),
        (edited(f"{PORT}|default", 80), "the setting listen.port has another default: 80 in place"),
        (edited(f"{PORT}|default"), "the setting listen.port is required now"),
        (edited(f"{PORT}|accepts|maximum", 100), "the setting listen.port does not accept all"),
        (edited(f"{PORT}|accepts|type", "string"), "the setting listen.port does not accept all"),
        (
            edited("settings|observe.log_level|accepts|enum", ["info", "warning", "error"]),
            'the setting observe.log_level does not accept all values that it accepted: "debug"',
        ),
        (
            edited("settings|listen.uds|accepts", {"type": "string"}),
            'the setting listen.uds does not accept all values that it accepted: {"type": "null"}',
        ),
        (
            edited("settings|listen.host|accepts|pattern", "^a$"),
            "the setting listen.host does not accept all",
        ),
        (
            edited("settings|auth.api_keys|accepts|items", {"type": "integer"}),
            "the setting auth.api_keys does not accept all",
        ),
        (edited("metrics|pdproxy_inflight"), "the metric pdproxy_inflight is gone"),
        (
            edited("metrics|pdproxy_inflight|type", "counter"),
            "the metric pdproxy_inflight has another type: counter in place of gauge",
        ),
        (
            edited("metrics|pdproxy_inflight|labels", {"pool": []}),
            "the metric pdproxy_inflight has other labels: pool in place of none",
        ),
        (
            edited("metrics|pdproxy_alone_total|labels|reason", ["n"]),
            "the metric pdproxy_alone_total has no value beam_search",
        ),
        (
            edited("log_fields|request|status"),
            "the log line request has no field status any more",
        ),
        (
            edited("log_fields||time", "number"),
            "the log line has the field time as a number in place of a string",
        ),
        (edited(ENGINES), "the admin API's GET /admin/v1/engines is gone"),
        (
            edited(f"{ENGINES}|takes|query pool"),
            "the admin API's GET /admin/v1/engines does not take the query pool any more",
        ),
        (
            edited(f"{ENGINES}|takes|query new", {"accepts": {}, "required": True}),
            "the admin API's GET /admin/v1/engines requires the query new now",
        ),
        (
            edited(f"{ENGINES}|gives|200 engines[].url"),
            "GET /admin/v1/engines does not return the 200 engines[].url any more",
        ),
        (
            edited(f"{ENGINES}|gives|200 engines[].url|required", False),
            "does not always return the 200 engines[].url any more",
        ),
        (
            edited(f"{ENGINES}|gives|200 engines[].url|is", {"type": "object"}),
            "returns the 200 engines[].url as object in place of string",
        ),
        (
            edited(f"{DRAIN}|takes|body keep|accepts", {"enum": [True]}),
            "drain does not accept all values of the body keep",
        ),
        (
            edited("command_line|pdproxy check|options|--strict"),
            "the command pdproxy check has no --strict any more",
        ),
        (
            edited("command_line|pdproxy check|exit_codes", [0, 2]),
            "the command pdproxy check has no exit code 1 any more",
        ),
        (
            edited("command_line|pdproxy demo|options|--prefill|default", 9),
            "the command pdproxy demo has another default of --prefill: 9 in place of",
        ),
        (
            edited("command_line|pdproxy demo|options|--engine|choices", ["sim"]),
            "the command pdproxy demo does not take vllm behind --engine any more",
        ),
        (
            edited("command_line|pdproxy demo|options|--new", {"values": "one", "required": True}),
            "the command pdproxy demo requires --new now, and did not",
        ),
        (
            edited("routes|GET /metrics|audience", "clients"),
            "the route GET /metrics is for clients, and was for operators",
        ),
        (
            edited("routes|GET /ready|gives|200 details"),
            "the route GET /ready does not return the 200 details any more",
        ),
    ],
)
def test_a_broken_promise_is_named(edit: Callable[[dict[str, Any]], None], sentence: str) -> None:
    """And another major version may break it."""
    new = copy.deepcopy(NOW)
    edit(new)
    (found,) = promises.broken(NOW, new)
    assert sentence in found
    assert not promises.broken(NOW, {**new, "version": "99.0.0"})


@pytest.mark.parametrize(
    "edit",
    [
        edited("settings|listen.new", {"accepts": {}, "default": 1}),
        edited(f"{PORT}|accepts|maximum", 100_000),
        edited(f"{PORT}|accepts", {"anyOf": [{"type": "number"}, {"enum": ["auto"]}]}),
        edited("settings|observe.log_level|accepts", {"type": "string"}),
        edited("metrics|pdproxy_new", {}),
        edited("metrics|pdproxy_requests_total|labels|outcome", []),
        edited("log_fields|request|new", "string"),
        edited(f"{ENGINES}|gives|200 new", {"is": {}, "required": False}),
        edited(f"{ENGINES}|takes|query new", {"accepts": {}, "required": False}),
        edited("command_line|pdproxy check|options|--new", {"values": "one"}),
        edited("routes|GET /new", {"audience": "clients", "gives": {}}),
    ],
)
def test_what_is_added_breaks_nothing(edit: Callable[[dict[str, Any]], None]) -> None:
    new = copy.deepcopy(NOW)
    edit(new)
    assert not promises.broken(NOW, new)
