"""A list and a watch of pods before an API server that keeps the rules of Kubernetes' own: whatever
fails, the objects are those of the server again, soon and without a false word.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdproxy.fleet import informer
from pdproxy.fleet.informer import ApiCollection, Counts, Found, Informer
from pdproxy.kit.errors import Wait
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.upstream import kubernetes
from pdproxy.upstream.kubernetes import KubernetesApi as Client
from pdproxy.wire.kubernetes import Pod
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.fakes.world import until

PATH = "/api/v1/namespaces/default/pods"
APP = {"labels": {"app": "vllm"}}


def kubeconfig(folder: Path, api: KubernetesApi, **user: Any) -> str:
    """Write a kubeconfig file, and return its name."""
    path = folder / "kubeconfig"
    cluster: dict[str, Any] = {"server": api.url}
    if api.url.startswith("http://"):  # to read all authorities takes 20 ms for each client
        cluster["insecure-skip-tls-verify"] = True
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": cluster}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "users": [{"name": "u", "user": user}],
            }
        )
    )
    return str(path)


class Follower:
    """What an informer has said."""

    def __init__(self, api: KubernetesApi, settings: Kubernetes, chance: float) -> None:
        self.api = api
        self.said: list[Found[Pod]] = []
        self.passed: list[Wait] = []
        self.counts = Counts()
        self.informer = Informer(
            ApiCollection(Pod, PATH, "app=vllm"),
            Client(settings).connection(),
            settings,
            self.take,
            self.counts,
            lambda: chance,
        )

    def take(self, found: Found[Pod]) -> None:
        self.said = [*self.said[-50:], found]
        if found.passed is not None:
            self.passed.append(found.passed)

    @property
    def names(self) -> set[str] | None:
        """The names of all pods, None while nothing is known."""
        objects = self.said[-1].objects if self.said else None
        return None if objects is None else {one.metadata.name for one in objects}

    @property
    def problem(self) -> str | None:
        return self.said[-1].problem if self.said else None

    async def has(self, *names: str) -> None:
        await until(lambda: self.names == {*names} and self.problem is None)


Follow = Callable[..., Any]


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with kubernetes_api() as made:
        yield made


@pytest.fixture
def follow(api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Follow:
    """Follow its pods. Times are short; `user`: of the kubeconfig file."""
    monkeypatch.setattr(informer, "RETRY", 0.01)
    monkeypatch.setattr(informer, "LONGEST_RETRY", 0.05)
    monkeypatch.setattr(informer, "SHORT", 0.05)

    @asynccontextmanager
    async def following(
        user: dict[str, Any] | None = None, chance: float = 0.5, **times: float
    ) -> AsyncIterator[Follower]:
        settings = Kubernetes(kubeconfig=kubeconfig(tmp_path, api, **(user or {})), **times)  # type: ignore[arg-type]
        made = Follower(api, settings, chance)
        task = asyncio.create_task(made.informer.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    return following


async def test_pods_come_and_go(api: KubernetesApi, follow: Follow) -> None:
    """All of them are said each time, and none that the selector does not select."""
    api.put("a", metadata=APP)
    api.put("other")
    async with follow() as f:
        await f.has("a")
        api.put("b", metadata=APP)
        await f.has("a", "b")
        api.delete("a")
        await f.has("b")
        api.put("b", metadata={"labels": {"app": "else"}})
        await f.has()
        assert f.counts.lists == {"start": 1}
        assert f.counts.events == {"added": 1, "deleted": 2}


async def test_a_long_list_has_pages(api: KubernetesApi, follow: Follow) -> None:
    names = [f"p{number:03}" for number in range(50)]
    for name in names:
        api.put(name, metadata=APP)
    api.most = 7
    async with follow() as f:
        await f.has(*names)
        assert api.answered["list"] == 8
        assert all(found.objects is not None and len(found.objects) == 50 for found in f.said)


async def test_what_was_deleted_while_the_watch_was_cut_is_gone(
    api: KubernetesApi, follow: Follow
) -> None:
    """The next watch begins where the last one ended: no list is needed, and nobody hears of it."""
    api.put("a", metadata=APP)
    async with follow() as f:
        await f.has("a")
        await until(lambda: api.watches)
        api.cut()
        api.delete("a")
        api.put("b", metadata=APP)
        await f.has("b")
        assert f.counts.lists == {"start": 1}
        assert not [found.problem for found in f.said if found.problem]


@pytest.mark.parametrize("how", ["status", "event"])
async def test_a_version_that_is_gone_has_a_list(
    how: str, api: KubernetesApi, follow: Follow
) -> None:
    """Of many events while no watch was open only the last are left."""
    api.expired, api.window = how, 2
    api.put("a", metadata=APP)
    async with follow() as f:
        await f.has("a")
        await until(lambda: api.watches)
        api.cut()
        api.delete("a")
        for _ in range(5):
            api.put("b", metadata=APP)
        await f.has("b")
        assert f.counts.lists == {"start": 1, "expired": 1}
        assert not [found.problem for found in f.said if found.problem]


async def test_pages_of_a_list_that_is_gone_have_a_list_from_the_start(
    api: KubernetesApi, follow: Follow
) -> None:
    names = [f"p{number}" for number in range(6)]
    for name in names:
        api.put(name, metadata=APP)
    api.most = 2
    asked, page = 0, api._list

    def forget_once(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            api.delete("p0")
            api.forget()
        return page(*args)

    api._list = forget_once  # type: ignore[assignment,method-assign]
    async with follow() as f:
        await f.has(*names[1:])
        assert f.counts.lists == {"expired": 1}
        assert all(found.objects is None or len(found.objects) == 5 for found in f.said)


async def test_a_server_that_is_behind_has_a_list(api: KubernetesApi, follow: Follow) -> None:
    """Its storage was put back, and pods with it: it says so, and they are gone."""
    api.put("a", metadata=APP)
    api.put("b", metadata=APP)
    async with follow() as f:
        await f.has("a", "b")
        del api.objects["pods", "default", "b"]
        api.go_back(50)
        await f.has("a")
        assert f.counts.lists == {"start": 1, "expired": 1}


async def test_a_server_that_is_behind_and_says_nothing_has_a_list_in_time(
    api: KubernetesApi, follow: Follow
) -> None:
    api.ahead = "silent"
    api.put("a", metadata=APP)
    async with follow(relist=0.3) as f:
        await f.has("a")
        await until(lambda: api.watches)
        del api.objects["pods", "default", "a"]
        api.go_back(50)
        await f.has()
        assert f.counts.lists["periodic"]
        assert f.counts.lists["expired"] == 0


async def test_a_watch_of_nothing_is_asked_anew_and_not_listed(
    api: KubernetesApi, follow: Follow
) -> None:
    """A machine between is gone: nothing tells, and no event comes. The deadline is counted."""
    api.put("a", metadata=APP)
    async with follow(silence=0.2) as f:
        await f.has("a")
        await until(lambda: api.watches)
        api.be_still()
        api.put("b", metadata=APP)
        await f.has("a", "b")
        assert f.counts.lists == {"start": 1}
        assert f.passed[:1] == [Wait.WATCH]


async def test_bookmarks_keep_the_version_young(api: KubernetesApi, follow: Follow) -> None:
    """Others' events pass the window meanwhile: no list is needed all the same."""
    api.bookmarks, api.window = 0.02, 3
    api.put("a", metadata=APP)
    async with follow(silence=30) as f:
        await f.has("a")
        await until(lambda: api.watches)
        for number in range(10):
            api.put(f"other-{number}")
        seen = f.counts.events["bookmark"]
        await until(lambda: f.counts.events["bookmark"] > seen + 1)
        api.cut()
        api.put("b", metadata=APP)
        await f.has("a", "b")
        assert f.counts.lists == {"start": 1}


async def test_a_list_comes_from_time_to_time(api: KubernetesApi, follow: Follow) -> None:
    async with follow(relist=0.1) as f:
        await until(lambda: f.counts.lists["periodic"] >= 2)
        assert f.counts.lists["start"] == 1
        assert not [found.problem for found in f.said if found.problem]


async def test_a_server_ends_watches_in_time(api: KubernetesApi, follow: Follow) -> None:
    """The next one begins at once, and is asked to last a while that differs by chance."""
    async with follow(watch_timeout=1, chance=1.0) as f:
        await until(lambda: api.answered["watch"] >= 2)
        assert f.counts.lists == {"start": 1}
        assert api.asked[-1][1]["timeoutSeconds"] == "1"
    async with follow(watch_timeout=100, chance=1.0):
        await until(lambda: api.asked[-1][1].get("timeoutSeconds") == "120")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("away", "disconnected"),
        ("silent", "no answer in 0.5 s"),
        ("garbage", "can't be read"),
        ("deep", "can't be read"),
        ("unavailable", "answers 503"),
        ("busy", "answers 429"),
        ("long", "an event of more than"),
        ("at_once", "ends watches at once"),
    ],
)
async def test_the_last_objects_stay_while_the_server_fails(
    fault: str,
    text: str,
    api: KubernetesApi,
    follow: Follow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is wrong is said; two failures in a row have a list once it works again."""
    monkeypatch.setattr(kubernetes, "MAX_LINE", 2**16)
    api.put("a", metadata=APP)
    async with follow(timeout=0.5 if fault == "silent" else 30) as f:
        await f.has("a")
        await until(lambda: api.watches)
        api.fault = fault
        api.cut()
        await until(lambda: text in (f.problem or ""))
        asked = len(api.asked)
        await until(lambda: len(api.asked) >= asked + 4)
        assert f.names == {"a"}
        api.delete("a")
        api.fault = ""
        await f.has()
        assert f.counts.lists["failed"] >= 1
        assert fault != "silent" or Wait.KUBERNETES in f.passed


async def test_pauses_grow_and_end(api: KubernetesApi, follow: Follow) -> None:
    async with follow() as f:
        await f.has()
        pauses = []
        for failures in range(1, 14):
            f.informer._failures = failures
            pauses.append(f.informer._pause())
        assert pauses[:3] == [0.0075, 0.015, 0.03]
        assert pauses[-1] == pytest.approx(informer.LONGEST_RETRY * 0.75)


async def test_a_token_that_was_replaced_is_read_again(
    api: KubernetesApi, follow: Follow, tmp_path: Path
) -> None:
    """The file has the new one: nobody hears of it. Later it has none that counts."""
    token = tmp_path / "token"
    token.write_text("first\n")
    api.tokens = {"first"}
    async with follow({"tokenFile": "token"}) as f:
        await f.has()
        token.write_text("second\n")
        api.tokens = {"second"}
        api.cut()
        api.put("a", metadata=APP)
        await f.has("a")
        assert f.counts.lists == {"start": 1}
        assert not [found.problem for found in f.said if found.problem]
        api.tokens = {"third"}
        api.cut()
        await until(lambda: "answers 401: Unauthorized" in (f.problem or ""))
        token.write_text("third\n")
        await f.has("a")


async def test_a_kubeconfig_file_that_was_replaced_is_read_again(
    api: KubernetesApi, follow: Follow, tmp_path: Path
) -> None:
    """With all that is in it."""
    api.tokens = {"first"}
    async with follow({"token": "first"}) as f:
        await f.has()
        api.tokens = {"second"}
        api.cut()
        await until(lambda: "answers 401: Unauthorized" in (f.problem or ""))
        kubeconfig(tmp_path, api, token="second")
        await f.has()


async def test_a_namespace_that_may_not_be_read_is_named(
    api: KubernetesApi, follow: Follow
) -> None:
    api.forbidden = {"default"}
    async with follow() as f:
        await until(lambda: "answers 403: pods is forbidden" in (f.problem or ""))
        assert f.names is None
        api.forbidden.clear()
        await f.has()


async def test_too_many_objects_are_refused(
    api: KubernetesApi, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a list as in a watch. So are answers that are too large."""
    monkeypatch.setattr(informer, "MAX_OBJECTS", 3)
    for name in "abc":
        api.put(name, metadata=APP)
    async with follow() as f:
        await f.has("a", "b", "c")
        api.put("d", metadata=APP)
        await until(lambda: "more than 3 objects" in (f.problem or ""))
        listed = api.answered["list"]
        await until(lambda: api.answered["list"] >= listed + 2)
        assert f.names == {"a", "b", "c"}
        assert "more than 3 objects" in (f.problem or "")
        api.delete("d")
        await f.has("a", "b", "c")
        monkeypatch.setattr(kubernetes, "MAX_ANSWER", 100)
        api.forget()
        api.go_back(50)
        await until(lambda: "an answer of more than 100 bytes" in (f.problem or ""))
        assert f.names == {"a", "b", "c"}


async def test_an_informer_equals_its_server_whatever_happens(
    api: KubernetesApi, follow: Follow
) -> None:
    """Changes and faults at random; after each short calm the pods are the server's."""
    chance = random.Random(7)
    faults: list[Callable[[], None]] = [
        api.cut,
        api.be_still,
        api.forget,
        lambda: api.go_back(api.version - 5),
        lambda: setattr(api, "expired", chance.choice(["status", "event"])),
        lambda: setattr(api, "fault", chance.choice(["away", "unavailable", "garbage", ""])),
    ]
    api.most, api.window, api.bookmarks = 5, 20, 0.03
    async with follow(silence=0.2, relist=1.0, timeout=0.5) as f:
        for _ in range(15):
            for _ in range(20):
                name = f"p{chance.randrange(12)}"
                if ("pods", "default", name) in api.objects and chance.random() < 0.5:
                    api.delete(name)
                else:
                    api.put(name, metadata=APP)
                if chance.random() < 0.2:
                    chance.choice(faults)()
                await asyncio.sleep(0.005 * chance.random())
            api.fault = ""
            await f.has(*(name for _, _, name in api.objects))
        assert f.counts.lists["expired"] + f.counts.lists["failed"] > 3
