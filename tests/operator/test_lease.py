"""The election: never two operators act at once, whatever fails, and one acts soon after another is
gone.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.upstream.kubernetes import KubernetesApi as Client
from pdproxy_operator.lease import DURATION, NAME, RENEW_WITHIN, Election, LostError
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.unit.test_informer import kubeconfig

Elect = Callable[[str], Election]


class Time:
    """Seconds that pass by sleeping alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with kubernetes_api() as made:
        yield made


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def elect(api: KubernetesApi, time: Time, tmp_path: Path) -> AsyncIterator[Elect]:
    settings = Kubernetes(kubeconfig=kubeconfig(tmp_path, api), timeout=5)
    made = []

    def one(holder: str) -> Election:
        connection = Client(settings).connection()
        made.append(connection)
        return Election(connection, "ops", holder, time, time.sleep)

    yield one
    for connection in made:
        await connection.drop()


async def test_another_one_acts_once_the_first_is_gone(
    api: KubernetesApi, time: Time, elect: Elect
) -> None:
    a, b = elect("a"), elect("b")
    await a.won()
    assert a.is_leader
    assert not await b._try()
    for _ in range(20):
        time.now += 2
        assert await a._try()
        assert not await b._try()
    lease = api.objects["leases", "ops", NAME]["spec"]
    assert (lease["holderIdentity"], lease["leaseTransitions"]) == ("a", 0)
    seen = time.now
    time.now = seen + RENEW_WITHIN
    assert not a.is_leader, "it stops before others may act"
    time.now = seen + DURATION - 0.1
    assert not await b._try()
    time.now = seen + DURATION
    assert await b._try()
    assert b.is_leader
    assert not await a._try()
    lease = api.objects["leases", "ops", NAME]["spec"]
    assert (lease["holderIdentity"], lease["leaseTransitions"]) == ("b", 1)
    with pytest.raises(LostError):
        await a.keep()


async def test_a_holder_that_cannot_renew_stops(
    api: KubernetesApi, time: Time, elect: Elect
) -> None:
    a = elect("a")
    await a.won()
    begun = time.now
    api.fault = "unavailable"
    with pytest.raises(LostError):
        await a.keep()
    assert begun + RENEW_WITHIN <= time.now < begun + DURATION


@pytest.mark.parametrize("seed", range(3))
async def test_never_two_act(api: KubernetesApi, time: Time, elect: Elect, seed: int) -> None:
    """With failures of the server, and holders that hang for a while."""
    chance = random.Random(seed)
    several = [elect(name) for name in "abc"]
    acted: set[int] = set()
    for _ in range(150):
        api.fault = "unavailable" if chance.random() < 0.2 else ""
        # two at the same time
        await chance.choice(several)._try()
        if chance.random() < 0.3:
            time.now += chance.choice((0.5, 3.0, 9.0, 20.0))
        leaders = [at for at, one in enumerate(several) if one.is_leader]
        assert len(leaders) <= 1
        acted |= {*leaders}
    assert acted == {0, 1, 2}
