"""Schedules: the same seed gives the same items, and leaving some out changes no other."""

from __future__ import annotations

from typing import get_args

import msgspec

from pdproxy_lab.sim.faults.book import parse
from tests.chaos.options import Options
from tests.chaos.schedule import ANSWERS, NOTICES, Call, Client, Fault, Trouble, schedule


def test_leaving_items_out_changes_no_other() -> None:
    options = Options(seed=5, seconds=20)
    whole = schedule(options)
    assert whole == schedule(options)
    assert len(whole) == 190
    kept = frozenset(range(3, 190, 7))
    assert schedule(msgspec.structs.replace(options, only=kept)) == [
        one for one in whole if one.number in kept
    ]
    assert schedule(msgspec.structs.replace(options, seed=6)) != whole


def test_times_are_in_order_and_within_the_load() -> None:
    items = schedule(Options(seed=1, seconds=10))
    assert [one.at for one in items] == sorted(one.at for one in items)
    assert items[0].at >= 0
    assert items[-1].at <= 10


def test_over_some_seeds_every_kind_of_client_and_fault_happens() -> None:
    items = [item for seed in range(40) for item in schedule(Options(seed=seed))]
    assert {one.client for one in items if isinstance(one, Call)} == set(get_args(Client))
    assert {one.what for one in items if isinstance(one, Fault)} == set(get_args(Trouble))
    specs = {one.spec.partition(":")[0] for one in items if isinstance(one, Fault) and one.spec}
    assert specs == {spec for specs in ANSWERS.values() for spec in specs}


def test_the_simulator_takes_every_fault() -> None:
    for item in schedule(Options(seed=2, seconds=600)):
        if isinstance(item, Fault) and item.spec:
            parse(item.spec)
        assert item.words()


def test_engines_for_any_role_have_faults_of_both_roles() -> None:
    items = [
        item
        for seed in range(20)
        for item in schedule(Options(seed=seed, pool="any", prefill=1, decode=2))
    ]
    faults = [one for one in items if isinstance(one, Fault)]
    assert {one.engine for one in faults} == {"E0", "E1", "E2"}
    assert {one.spec.partition(":")[0] for one in faults if one.spec} == set(ANSWERS["E"])
    assert all(one.other != one.engine for one in faults)


def test_notices_have_faults_only_where_there_are_some() -> None:
    for notices in ("none", "notifier"):
        items = [
            item for seed in range(20) for item in schedule(Options(seed=seed, notices=notices))
        ]
        specs = {one.spec.partition(":")[0] for one in items if isinstance(one, Fault)}
        assert specs & set(NOTICES) == (set(NOTICES) if notices == "notifier" else set())
        for one in items:
            if isinstance(one, Fault) and one.spec:
                parse(one.spec)


def test_the_command_repeats_the_run() -> None:
    options = Options(seed=17, seconds=12.5, decode=2, faults=3.0)
    assert (
        options.command() == "python -m tests.chaos --seed 17 --seconds 12.5 --decode 2 --faults 3"
    )
    assert options.command(frozenset({41, 3})).endswith("--only 3,41")
    assert (
        Options(connector="cpu").command()
        == "python -m tests.chaos --seed 0 --seconds 60 --connector cpu"
    )
    assert Options(pool="any").command() == "python -m tests.chaos --seed 0 --seconds 60 --pool any"
    assert (
        Options(notices="early").command()
        == "python -m tests.chaos --seed 0 --seconds 60 --notices early"
    )
    assert Options().command() == "python -m tests.chaos --seed 0 --seconds 60"
