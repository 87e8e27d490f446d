"""An object of many levels keeps no other from being read."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import pytest

from pdproxy.wire.kubernetes import Page
from pdproxy_operator.followed import Unread
from pdproxy_operator.run import RECURSION

LEVELS = 9_990


@pytest.fixture
def _as_in_run() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(RECURSION)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("_as_in_run")
def test_a_list_with_the_deepest_object_that_the_api_server_takes_is_read() -> None:
    deep = b'{"a":' * LEVELS + b"1" + b"}" * LEVELS
    item = b'{"metadata":{"name":"p"},"spec":{"template":' + deep + b"}}"
    page = b'{"metadata":{"resourceVersion":"1"},"items":[' + item + b"]}"
    (found,) = msgspec.json.decode(page, type=Page[Unread]).items
    assert found.metadata.name == "p"
    assert len(msgspec.json.encode(msgspec.json.decode(found.spec))) > LEVELS
