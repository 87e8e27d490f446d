"""Which contract engines run, from what they show: as a table, over the recordings of real engines,
and over any answer.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.transfer import detect, registry
from pdproxy.transfer.contract import Contract
from pdproxy.transfer.detect import (
    DetectedContract,
    Observation,
    Undecided,
    candidates,
    decide,
    question,
)
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.signs import ContractSigns
from pdproxy.upstream.metrics_page import names_in
from tests.sim.recordings.reading import names, read, read_all

NIXL = frozenset({"vllm:nixl_"})
NONE: frozenset[str] = frozenset()
PULL = b'{"remote_engine_id":"e","remote_block_ids":[[1]],"transfer_mode":"pull"}'
PUSH = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7]],'
    b'"remote_engine_id":"push-p",'
    b'"remote_request_id":"cmpl-b-0-bc1a525f","remote_host":"127.0.0.1","remote_port":5600,'
    b'"tp_size":1,"dcp_size":1,"pp_size":1,'
    b'"remote_num_tokens":2,"transfer_mode":"push","remote_prefill_cached_tokens":0}'
)
"""As a real prefill engine that pushes has answered."""
OLD = b'{"remote_engine_id":"e","remote_block_ids":[[1]]}'


def _unbuilt(_: Any) -> Contract:
    raise AssertionError


ALL = registry.ENTRIES


def p(**more: Any) -> Observation:
    return Observation(
        **{"url": "http://p:1", "role": "prefill", "version": "0.32.0", "metrics": NONE, **more}
    )


def d(**more: Any) -> Observation:
    return Observation(
        **{"url": "http://d:1", "role": "decode", "version": "0.32.0", "metrics": NONE, **more}
    )


@pytest.mark.parametrize(
    ("seen", "contract"),
    [
        ([p(metrics=NIXL, answer=PULL), d(metrics=NIXL)], "nixl"),
        ([p(metrics=NIXL, answer=OLD, version="0.11.0"), d(metrics=NIXL)], "nixl"),
        # either may not name its mode
        ([p(metrics=NIXL, answer=OLD, version="0.26.0"), d(metrics=NIXL)], None),
        ([p(metrics=NIXL, answer=PUSH), d(metrics=NIXL)], "nixl-push"),
        ([p(metrics=None, answer=PULL), d(metrics=None)], "nixl"),
        ([p(kv_connector="NixlConnector"), d(kv_connector="NixlConnector")], None),
        ([p(kv_connector="NixlConnector", metrics=NIXL), d(metrics=NIXL)], "nixl"),
        ([p(kv_connector="NixlPushConnector", metrics=NIXL), d(metrics=NIXL)], "nixl-push"),
        ([p(kv_connector="ExampleConnector"), d(kv_connector="ExampleConnector")], "shared"),
        ([p(kv_connector="CPUConnector", version="0.9.1"), d(version="0.9.1")], "cpu"),
        (
            [
                p(metrics=frozenset({"vllm:mooncake_store_"})),
                d(metrics=frozenset({"vllm:mooncake_store_"})),
            ],
            "shared",
        ),
        ([p(bootstrap=True), d()], "mooncake"),
        ([p(bootstrap=True), d(metrics=None)], "mooncake"),
    ],
)
def test_found(seen: list[Observation], contract: str | None) -> None:
    found = decide(seen, ALL)
    assert (found.contract if isinstance(found, DetectedContract) else None) == contract
    assert found.lines == tuple(one.text() for one in seen)


@pytest.mark.parametrize(
    ("seen", "choices", "reason"),
    [
        (
            [p(bootstrap=False), d()],
            ("lmcache-pd", "lmcache-mp", "shared", "moriio"),
            (
                "do not show which of these they run: lmcache-pd or lmcache-mp or shared or "
                "moriio, "
                "or none. Name it"
            ),
        ),
        (
            [p(metrics=frozenset({"lmcache:"}), bootstrap=False), d()],
            ("lmcache-pd", "lmcache-mp", "shared"),
            "which of these they run: lmcache-pd or lmcache-mp or shared. Name it",
        ),
        (
            [p(kv_connector="LMCacheConnectorV1"), d()],
            ("lmcache-pd", "shared"),
            "which of these they run: lmcache-pd or shared. Name it",
        ),
        (
            [p(metrics=NIXL, refusal="500"), d(metrics=NIXL)],
            ("nixl", "nixl-push"),
            "nixl or nixl-push. Name it",
        ),
        ([p(metrics=NIXL, answer=b"null"), d(metrics=NIXL)], (), "http://p:1 keeps no KV although"),
        (
            [p(metrics=NIXL, answer=b'{"first_tok":1}'), d(metrics=NIXL)],
            (),
            "no connector of pdproxy's fits http://p:1",
        ),
        (
            [p(kv_connector=""), d()],
            (),
            "http://p:1 was started without a KV connector (--kv-transfer-config)",
        ),
        (
            [p(kv_connector="MyConnector"), d()],
            (),
            "no connector of pdproxy's serves MyConnector of http://p:1",
        ),
        (
            [p(metrics=NIXL, answer=PULL), d()],
            (),
            "engines of different connectors: http://p:1 is nixl, http://d:1 is",
        ),
        (
            [
                p(metrics=NIXL, answer=PULL),
                p(url="http://p:2", metrics=NIXL, answer=PUSH),
                d(metrics=NIXL),
            ],
            (),
            "engines of different connectors: http://p:1 is nixl, http://p:2 is nixl-push",
        ),
    ],
)
def test_undecided(seen: list[Observation], choices: tuple[str, ...], reason: str) -> None:
    found = decide(seen, ALL)
    assert isinstance(found, Undecided)
    assert found.choices == choices
    assert reason in found.reason
    assert len(found.lines) == len(seen)


def test_three_engines_of_which_no_two_differ_alone() -> None:
    """Each pair has a contract in common, and all three have none: the reason names engines
    nevertheless.
    """
    one, two, three = (
        Entry(name=name, build=_unbuilt, kv_connectors=connectors)
        for name, connectors in (("one", ("a", "b")), ("two", ("b", "c")), ("three", ("a", "c")))
    )
    seen = [p(url=f"http://{name}:1", kv_connector=name) for name in ("a", "b", "c")]
    found = decide(seen, (one, two, three))
    assert isinstance(found, Undecided)
    assert "different connectors" in found.reason


@pytest.mark.parametrize(
    ("seen", "asked"),
    [
        (p(metrics=NIXL), True),
        (d(metrics=NIXL), False),
        (p(metrics=NONE), False),  # LMCache's sender dies of a request that is not of its contract
        (p(metrics=None), False),
        (p(metrics=frozenset({"lmcache:"})), False),
        (p(metrics=frozenset({"lmcache:", "vllm:nixl_"})), False),
        (p(kv_connector="NixlConnector", metrics=NIXL), True),
        (p(kv_connector="OtherConnector", metrics=NIXL), False),
        (p(bootstrap=True), False),
    ],
)
def test_only_engines_that_survive_it_are_asked(seen: Observation, asked: bool) -> None:
    assert (question(seen, ALL) is not None) is asked


@pytest.mark.parametrize(
    ("last", "version", "fits"),
    [
        ("0.9", "0.9.2", True),
        ("0.9", "0.10.0", False),
        ("0.9", "0.8.5.post1", True),
        ("0.10", "0.9.1.dev3+gabc", True),
        ("0.23", "1.0", False),
        ("", "99.0", True),
        ("0.9", "", True),
        ("0.9", "main", True),
    ],
)
def test_versions(last: str, version: str, fits: bool) -> None:
    assert ContractSigns(last_version=last).in_version(version) is fits


def test_a_first_version() -> None:
    signs = ContractSigns(first_version="0.20", last_version="0.23")
    assert [
        signs.in_version(version) for version in ("0.19.9", "0.20.0", "0.23.1", "0.24", "")
    ] == [
        False,
        True,
        True,
        False,
        True,
    ]


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["remote_engine_id", "remote_block_ids", "transfer_mode"]), inner
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_answer_is_one_or_none(answer: bytes) -> None:
    """An engine may answer anything: it fits a contract or it does not, and the text is one line of
    bounded length.
    """
    seen = p(metrics=NIXL, answer=answer)
    assert {entry.name for entry in candidates(seen, ALL)} <= {"nixl", "nixl-push"}
    assert seen.text().isprintable()
    assert len(seen.text()) < 600


def test_the_signs_of_the_registry() -> None:
    assert "vllm:nixl_" in detect.metrics_to_look_for()
    assert detect.has_bootstrap(ALL)
    assert registry.AUTO in registry.choices()
    assert registry.AUTO not in registry.names()


# -- recordings of real engines


def recorded(name: str) -> list[tuple[Any, bytes]]:
    """The params that completions of a recording carried, and those of their answers."""
    found = []
    for one in read_all(name):
        try:
            sent, answer = one.sent.json, one.answer and one.answer.json
        except ValueError:
            continue
        if isinstance(sent, dict) and isinstance(answer, dict) and "choices" in answer:
            found.append(
                (
                    sent.get("kv_transfer_params"),
                    json.dumps(answer.get("kv_transfer_params")).encode(),
                )
            )
    return found


@pytest.mark.parametrize(
    ("name", "contract"),
    [
        ("connector_notify_01", "nixl"),
        ("connector_example_01", None),
        ("connector_lmcache_01", None),
    ],
)
def test_what_real_prefill_engines_answered(name: str, contract: str | None) -> None:
    """To the question that is asked here, or to what their contract sends them."""
    fitting = {
        entry.name
        for sent, answer in recorded(name)
        if sent is None or not sent.get("do_remote_prefill")
        for entry in candidates(p(metrics=NIXL, answer=answer), ALL)
    }
    assert fitting == ({contract} if contract is not None else set())


@pytest.mark.parametrize("name", [name for name in names() if "metrics" in name])
def test_what_real_engines_metrics_show(name: str) -> None:
    answer = read(name).answer
    assert answer is not None
    shown = names_in(answer.body, detect.metrics_to_look_for())
    assert shown == (NONE if name.startswith("agg") else NIXL)


def test_names_of_metrics_without_values() -> None:
    page = b"# HELP vllm:nixl_x nothing\n# TYPE vllm:nixl_x counter\nother 1\n"
    assert names_in(page, ["vllm:nixl_", "lmcache:", "oth"]) == {"vllm:nixl_", "oth"}
    assert names_in(b"lmcache:x 1", ["lmcache:"]) == {"lmcache:"}
    assert names_in(b"x lmcache:x 1", ["lmcache:"]) == set()
