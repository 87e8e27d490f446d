"""What is left of a handle after its end: a long prompt's has thousands of blocks, and an answer
may take an hour.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import Custody, End
from pdproxy.transfer.contract import Contract, Counts, FirstToken, Handle
from pdproxy.transfer.moriio import MORIIO
from pdproxy.transfer.nixl import NIXL
from pdproxy.transfer.nixl_push import CONTRACT as PUSH
from tests.unit.test_custody import LEG, custodian

BLOCKS = json.dumps({"remote_block_ids": [list(range(4000))], "remote_host": "h"}).encode()
FIRST = FirstToken(id=7, text="a", finish_reason=None)
ENDS: dict[str, Callable[[Custody], None]] = {
    "loaded": lambda custody: custody.end(End.LOADED),
    "released": lambda custody: custody.end(End.RELEASED),
    "expired": lambda custody: custody.end(End.EXPIRED),
    "lost": lambda custody: custody.end(End.LOST),
}


def kept(contract: Contract, promised: bool) -> tuple[Custodian, Custody]:
    """A custodian, and a handle that it has."""
    holder = custodian(contract)
    handle = Handle(BLOCKS, b"[1,2,3]", 3, "r1", cached_tokens=2, first=FIRST)
    return holder, holder.promise(handle, LEG) if promised else holder.take(handle, LEG)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("contract", [NIXL, PUSH, MORIIO], ids=lambda contract: contract.name)
def test_its_params_and_ids_go_and_what_was_counted_stays(contract: Contract, end: str) -> None:
    holder, custody = kept(contract, promised=False)
    assert isinstance(custody.handle, Handle)
    ENDS[end](custody)
    assert isinstance(custody.handle, Counts)
    assert (custody.handle.prompt_tokens, custody.handle.cached_tokens) == (3, 2)
    assert custody.handle.first == FIRST, "the answer is still rewritten behind it"
    assert not holder._live
    assert sum(count for count, _ in holder.snapshot().values()) == 0


@pytest.mark.parametrize("contract", [PUSH, MORIIO], ids=lambda contract: contract.name)
def test_a_promise_that_was_not_kept_leaves_nothing(contract: Contract) -> None:
    holder, custody = kept(contract, promised=True)
    assert holder.snapshot()["promised"][0] == 1
    custody.not_made("it failed")
    custody.not_made("it failed")
    assert custody.how is End.NOT_MADE
    assert not holder._live
    assert isinstance(custody.handle, Counts)


def test_one_that_nobody_knows_is_ended_without_harm() -> None:
    """Its end changes nothing of another one with the same name."""
    holder, custody = kept(NIXL, promised=False)
    other = holder.take(Handle(BLOCKS, None, 3, "r1"), LEG)
    for _ in range(2):
        custody.end(End.LOADED)
    assert set(holder._live) == {other}
    assert isinstance(other.handle, Handle)


def test_many_leave_no_entry_behind() -> None:
    holder = custodian(NIXL)
    for number in range(1000):
        holder.take(Handle(BLOCKS, None, 3, f"r{number}"), LEG).end(End.LOADED)
    assert len(holder._live) == 0
    assert holder._named == {}
