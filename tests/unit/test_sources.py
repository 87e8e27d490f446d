"""What of an answer becomes the pool's engines: readiness, identities, roles, what is left out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdproxy.fleet import membership
from pdproxy.fleet.sources import FoundEngine, FoundEngines, SourceAnswer
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kv import ReceiverSettings
from tests.fakes.world import until
from tests.unit.test_membership import World

URL = "pods://:8000/app=vllm"
ONE, TWO = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


@pytest.fixture
async def w(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(membership, "LOOK", 0.001)
    made = World()
    yield made
    await made.tasks.settle(0)


def followed(w: World, **template: Any) -> FoundEngines:
    engine = ConfiguredEngine(**{"url": URL, "role": "decode", **template})
    return FoundEngines(engine, w.members, w.observers, lambda: w.time)


def pod(
    url: str = ONE, uid: str = "a", *, ready: bool = True, role: Any = None, **labels: str
) -> FoundEngine:
    return FoundEngine(url, role, labels, ready, uid, "it does not say its role")


def answer(*engines: FoundEngine, left_out: tuple[str, ...] = ()) -> SourceAnswer:
    return SourceAnswer(engines, left_out=left_out)


def in_use(w: World) -> set[str]:
    return {url for url, member in w.members.members.items() if member.drain is None}


async def test_an_engine_joins_when_it_is_ready_and_stays_while_it_is_not(w: World) -> None:
    """Only its absence removes it: a busy engine fails readiness probes."""
    source = followed(w)
    source.answered(answer(pod(ready=False), pod(TWO, "b")))
    assert in_use(w) == {TWO}
    source.answered(answer(pod(), pod(TWO, "b", ready=False)))
    assert in_use(w) == {ONE, TWO}
    source.answered(answer(pod(ready=False), pod(TWO, "b", ready=False)))
    assert in_use(w) == {ONE, TWO}
    source.answered(answer(pod(TWO, "b", ready=False)))
    assert in_use(w) == {TWO}
    source.answered(answer(pod(ready=False), pod(TWO, "b", ready=False)))
    assert in_use(w) == {TWO}, "it was given up, and joins anew when it is ready"


async def test_who_was_there_before_this_process_stays_although_it_is_not_ready(w: World) -> None:
    """The processes before it had seen it ready."""
    source = followed(w)
    w.members.apply(URL, [ConfiguredEngine(url=ONE, role="decode", labels={"pod": "p"})])
    source.answered(answer(pod(ready=False, pod="p")))
    assert in_use(w) == {ONE}


async def test_a_label_of_the_settings_makes_no_other_engine(w: World) -> None:
    """Of sources that know no pods, such as DNS, the label pod is the settings' own."""
    source = followed(w, labels={"pod": "mine"})
    w.members.apply(URL, [ConfiguredEngine(url=ONE, role="decode", labels={"pod": "mine"})])
    before = w.members.members[ONE]
    source.answered(answer(FoundEngine(ONE)))
    assert w.members.members[ONE] is before


async def test_another_pod_than_the_processes_before_had_is_another_engine(w: World) -> None:
    """They have left the name of its pod."""
    source = followed(w)
    w.members.apply(URL, [ConfiguredEngine(url=ONE, role="decode", labels={"pod": "p-1"})])
    before = w.members.members[ONE]
    source.answered(answer(pod(pod="p-2")))
    after = w.members.members[ONE]
    assert after is not before
    assert after.drain is None


@pytest.mark.parametrize("ready", [True, False])
async def test_another_pod_with_the_same_address_is_another_engine(w: World, ready: bool) -> None:
    """Nothing of the old one is left, and it is not drained: it is gone."""
    source = followed(w)
    source.answered(answer(pod(pod="p-1")))
    before = w.members.members[ONE]
    source.answered(answer(pod(uid="b", ready=ready, pod="p-2")))
    after = w.members.members.get(ONE)
    assert before is not after
    assert after is None if not ready else after is not None and after.drain is None
    if after is not None:
        assert after.is_new
        assert after.settings.labels == {"pod": "p-2"}


async def test_another_pod_with_the_address_of_one_that_leaves_is_another_engine(
    w: World,
) -> None:
    """Nothing of the drain is left. Of addresses that nobody has any more nothing is kept."""
    source = followed(w)
    source.answered(answer(pod(pod="p")))
    before = w.engines[ONE]
    w.held.add(ONE)
    source.answered(answer(pod(TWO, "b")))
    assert w.members.members[ONE].leaves
    source.answered(answer(pod(uid="c", pod="p"), pod(TWO, "b")))
    assert in_use(w) == {ONE, TWO}
    assert w.engines[ONE] is not before
    w.held.clear()
    source.answered(answer(pod(TWO, "b")))
    await until(lambda: w.members.members.keys() == {TWO})
    source.answered(answer(pod(TWO, "b")))
    assert source._identities == {TWO: "b"}


async def test_another_pod_that_two_sources_name_keeps_nobody_out(w: World) -> None:
    """The first that says so leaves the engine to the other one, which has the new one."""
    both = followed(w), followed(w, url="pods://:8000/app=all")
    for source in both:
        source.answered(answer(pod(pod="p-1")))
    before = w.members.members[ONE]
    new = answer(pod(uid="b", pod="p-2"), pod(TWO, "c"))
    both[0].answered(new)
    assert in_use(w) == {ONE, TWO}
    both[1].answered(new)
    assert w.members.members[ONE] is not before
    assert w.members.members[ONE].settings.labels == {"pod": "p-2"}
    both[0].answered(new)
    assert both[0].shortcomings() == both[1].shortcomings() == []


async def test_the_same_pod_with_other_labels_is_the_same_process(w: World) -> None:
    source = followed(w, labels={"rack": "r"})
    source.answered(answer(pod(zone="a")))
    before = w.members.members[ONE]
    source.answered(answer(pod(zone="b")))
    assert w.members.members[ONE] is before
    assert before.settings.labels == {"rack": "r", "zone": "b"}


async def test_roles_come_from_labels_where_the_settings_say_so(w: World) -> None:
    """What the settings have for decode engines, only these get."""
    receiver = ReceiverSettings(init_ports=(1,), alloc_ports=(2,))
    source = followed(w, role="by_label", receiver=receiver, serves_whole=True)
    three = "http://10.0.0.3:8000"
    source.answered(answer(pod(role="prefill"), pod(TWO, "b", role="decode"), pod(three, "c")))
    members = w.members.members
    assert in_use(w) == {ONE, TWO}
    assert (members[ONE].settings.role, members[TWO].settings.role) == ("prefill", "decode")
    assert members[ONE].settings.receiver == ReceiverSettings()
    assert members[TWO].settings.receiver == receiver
    assert (members[ONE].settings.serves_whole, members[TWO].settings.serves_whole) == (True, False)
    assert source.shortcomings() == [f"{URL}: it does not say its role"]
    assert source.left_out == 1


async def test_the_settings_role_counts_whatever_labels_say(w: World) -> None:
    source = followed(w)
    source.answered(answer(pod(role="prefill")))
    assert w.members.members[ONE].settings.role == "decode"
    assert source.shortcomings() == []


async def test_one_that_cannot_be_used_keeps_nobody_out(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither now, nor when others come; if nobody can be used, nothing changes."""
    checked = w.setup.checked

    def strict(engine: ConfiguredEngine) -> ConfiguredEngine:
        if engine.role == "any":
            raise SettingsError(f"{engine.url} has one role")
        return checked(engine)

    monkeypatch.setattr(w.setup, "checked", strict)
    monkeypatch.setattr(w.setup, "checked_all", lambda engines: [strict(one) for one in engines])
    source = followed(w, role="by_label")
    bad = pod(role="any")
    source.answered(answer(bad, pod(TWO, "b", role="decode"), left_out=("pod x has no port",)))
    assert in_use(w) == {TWO}
    wrong = [f"{URL}: pod x has no port", f"{URL}: {ONE} has one role"]
    assert source.shortcomings() == wrong
    source.answered(answer(bad))
    assert in_use(w) == {TWO}
    assert "has one role" in source.shortcomings()[0]
    assert source.counts == {"changed": 1, "failed": 1}


async def test_an_engine_whose_new_role_cannot_be_used_keeps_nobody_out(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves, as one without a role does. New settings that it can't have are refused."""
    checked = w.setup.checked

    def strict(engine: ConfiguredEngine) -> ConfiguredEngine:
        if engine.role == "any" or engine.serves_whole:
            raise SettingsError(f"{engine.url} can't do so")
        return checked(engine)

    monkeypatch.setattr(w.setup, "checked", strict)
    source = followed(w, role="by_label")
    one, two, three = pod(role="decode"), pod(TWO, "b", role="prefill"), "http://10.0.0.3:8000"
    source.answered(answer(one, two))
    with pytest.raises(SettingsError, match="can't do so"):
        source.use(ConfiguredEngine(url=URL, role="by_label", serves_whole=True))
    assert in_use(w) == {ONE, TWO}
    source.answered(answer(pod(role="any"), two, pod(three, "c", role="decode")))
    assert in_use(w) == {TWO, three}
    assert source.shortcomings() == [f"{URL}: {ONE} can't do so"]
