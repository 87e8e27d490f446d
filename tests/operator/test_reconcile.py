"""The operator before an API server that keeps the rules of Kubernetes': it has all objects be as
they should, writes nothing where nothing differs, and converges however often it is killed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdproxy.fleet import informer
from pdproxy.upstream.kubernetes import ApiError
from pdproxy_operator import api, lease, pages, store, work
from pdproxy_operator.kinds import DEPLOYMENTS
from pdproxy_operator.names import MANAGED_BY, MANAGER
from pdproxy_operator.resources import API_VERSION
from tests.fakes.world import until
from tests.operator.cluster import NAMESPACE, Cluster, cluster
from tests.operator.resources import proxy, runtime

NEW = "vllm/vllm-openai:v0.33.0"
KILLS = 15  # tests/kubernetes/long_operator.py has 50, before a real API server


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "RETRY", 0.01)
    monkeypatch.setattr(informer, "LONGEST_RETRY", 0.05)
    monkeypatch.setattr(work, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(work, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(store, "CAUGHT_UP", 0.5)
    monkeypatch.setattr(pages, "EVERY", 0.2)


@pytest.fixture
async def some(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as made:
        yield made


def images(of: Cluster) -> dict[str, str]:
    """The images of all engines, by pod."""
    return {
        name: one["spec"]["template"]["spec"]["containers"][0]["image"]
        for name, one in of.of("deployments").items()
    }


async def test_objects_are_made_and_nothing_is_written_twice(some: Cluster) -> None:
    some.put(runtime("p", "prefill"), runtime("d", "decode", replicas=2), proxy())
    async with some.operating():
        await until(lambda: "status" in some.of("pdproxies").get("pdproxy", {}))
        await some.calm()
        made = some.shown()
        assert {plural for plural, _ in made} >= {
            *("deployments", "configmaps", "services", "serviceaccounts", "roles"),
            *("rolebindings", "poddisruptionbudgets", "networkpolicies"),
        }
        assert len(some.of("deployments")) == 3
        assert some.of("pdruntimes")["d"]["status"]["readyReplicas"] == 2
        assert some.of("pdproxies")["pdproxy"]["status"]["url"] == "http://pdproxy.llm.svc:80"
        some.api.requests.clear()
    async with some.operating():
        await until(lambda: len(some.api.requests) > 20)
        await some.calm(0.5)
    asked = {method for method, _ in some.api.requests}
    assert asked == {"GET"}, "another operator finds nothing to do"


async def test_what_others_change_is_put_back_and_what_they_add_stays(some: Cluster) -> None:
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy())
    async with some.operating():
        await until(lambda: len(some.of("deployments")) == 3)
        await some.calm()
        before = some.shown()
        service = some.of("services")["pdproxy"]
        other = {**service, "metadata": {**service["metadata"]}, "spec": {**service["spec"]}}
        other["metadata"]["annotations"] = {
            **service["metadata"]["annotations"],
            "of/others": "stays",
        }
        other["spec"] |= {"selector": {"changed": "by others"}, "externalIPs": ["10.0.0.1"]}
        some.api._store(("services", NAMESPACE, "pdproxy"), other)
        bare = some.of("services")["pdproxy-all"]
        metadata = {**bare["metadata"], "labels": {}}
        some.api._store(("services", NAMESPACE, "pdproxy-all"), {**bare, "metadata": metadata})
        some.api.delete("d-prestop", NAMESPACE, "configmaps")
        await until(lambda: "d-prestop" in some.of("configmaps"))
        await some.calm()
        after = some.shown()
        found = after["services", "pdproxy"]
        assert found["metadata"]["annotations"].pop("of/others") == "stays"
        assert found["spec"].pop("externalIPs") == ["10.0.0.1"]
        # the server merges maps: what was added to the selector is not the operator's
        assert found["spec"]["selector"].pop("changed") == "by others"
        assert after == before


async def test_what_is_not_wanted_any_more_is_deleted(some: Cluster) -> None:
    route = {"parentRefs": [{"name": "gateway"}], "hostnames": []}
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy(route=route))
    async with some.operating():
        await until(lambda: some.of("httproutes"))
        await some.calm()
        # of another: same labels, another owner
        some.put(proxy())
        await until(lambda: not some.of("httproutes"))
        some.api.delete("p", NAMESPACE, "pdruntimes")
        await until(lambda: "p-prestop" not in some.of("configmaps"))
        await some.calm()
        assert len(some.of("deployments")) == 2


async def test_an_object_of_others_is_left_alone_and_named(some: Cluster) -> None:
    some.api.put("pdproxy", NAMESPACE, "services", spec={"selector": {"of": "others"}})
    before = some.of("services")["pdproxy"]
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy())
    async with some.operating():
        await until(lambda: some.of("pdproxies")["pdproxy"].get("status"))
        await some.calm()
        assert some.of("services")["pdproxy"] == before
        assert "There is a Service pdproxy that is not of this PDProxy" in str(
            some.of("pdproxies")["pdproxy"]["status"]["conditions"]
        )
        assert "pdproxy-replicas" in some.of("services"), "others are made"


async def test_what_the_api_server_refuses_is_said_and_stops_no_other(some: Cluster) -> None:
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy())
    some.api.refuses["deployments"] = "spec.template: Invalid value"
    async with some.operating() as operator:
        await until(lambda: some.of("pdruntimes")["d"].get("status"))
        await until(lambda: some.of("pdproxies")["pdproxy"].get("status"))
        said = "The API server refuses the Deployment {}: spec.template: Invalid value"
        name = f"d-{some.of('pdruntimes')['d']['status']['revision']}"
        assert said.format(name) in str(some.of("pdruntimes")["d"]["status"]["conditions"])
        assert said.format("pdproxy") in str(some.of("pdproxies")["pdproxy"]["status"])
        assert {"d-prestop", "p-prestop"} <= some.of("configmaps").keys()
        await until(lambda: 'result="failed"} 0.0' not in str(operator.answers()["/metrics"]()))
        some.api.refuses.clear()
        await until(lambda: len(some.of("deployments")) == 3)
        await until(lambda: "refuses" not in str(some.of("pdruntimes")["d"]["status"]))


async def test_an_object_of_another_owner_is_left_alone_while_there_is_one(some: Cluster) -> None:
    """What a PDProxy of the same name has left is made anew. Of two PDProxies that need the same
    name one gets it, and the other says so.
    """
    some.collects = False
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy())
    labels = {"app.kubernetes.io/managed-by": "pdproxy-operator", "pdproxy.dev/proxy": "pdproxy"}
    metadata = {
        "labels": labels,
        "ownerReferences": [{"apiVersion": API_VERSION, "uid": "gone", "controller": True}],
    }
    some.api.put("pdproxy", NAMESPACE, "services", metadata=metadata, spec={})
    async with some.operating():
        await until(lambda: some.of("services").get("pdproxy", {}).get("spec"))
        (owner,) = some.of("services")["pdproxy"]["metadata"]["ownerReferences"]
        assert owner["uid"] == uid_of(some, "pdproxies", "pdproxy")
        some.put(proxy("pdproxy-all"))
        await until(lambda: some.of("pdproxies")["pdproxy-all"].get("status"))
        await some.calm()
        said = {
            name: str(one["status"]["conditions"]) for name, one in some.of("pdproxies").items()
        }
        note = "There is a Service pdproxy-all that is not of this PDProxy"
        assert [note in said[name] for name in ("pdproxy", "pdproxy-all")] == [False, True]
        (owner,) = some.of("services")["pdproxy-all"]["metadata"]["ownerReferences"]
        assert owner["uid"] == uid_of(some, "pdproxies", "pdproxy")


def uid_of(of: Cluster, plural: str, name: str) -> str:
    return str(of.of(plural)[name]["metadata"]["uid"])


@pytest.mark.parametrize(
    "owners", [[], [{"apiVersion": "example.com/v1", "uid": "u", "controller": True}]]
)
async def test_what_looks_like_its_own_and_has_another_owner_is_not_deleted(
    some: Cluster, owners: list[object]
) -> None:
    metadata = {"labels": {MANAGED_BY: MANAGER}, "ownerReferences": owners}
    some.api.put("owner-of-all", NAMESPACE, "services", metadata={"uid": "u"})
    some.api.objects["services", NAMESPACE, "owner-of-all"]["metadata"]["uid"] = "u"
    some.api.put("p-prestop", NAMESPACE, "configmaps", metadata=metadata, data={"of": "others"})
    some.put(runtime("p", "prefill"))
    async with some.operating():
        await until(lambda: some.of("pdruntimes")["p"].get("status"))
        await some.calm()
        assert some.of("configmaps")["p-prestop"]["data"] == {"of": "others"}
        assert "There is a ConfigMap p-prestop that is not of this PDRuntime" in str(
            some.of("pdruntimes")["p"]["status"]["conditions"]
        )


async def test_no_right_is_given_that_a_role_of_others_has(some: Cluster) -> None:
    """Else who may make a PDProxy gets the rights of each Role of the namespace, by its name."""
    some.api.put("deployer", NAMESPACE, "roles", rules=[{"verbs": ["*"]}])
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy("deployer"))
    async with some.operating():
        await until(lambda: some.of("pdproxies")["deployer"].get("status"))
        await some.calm()
        assert "There is a Role deployer" in str(some.of("pdproxies")["deployer"]["status"])
        assert not some.of("rolebindings")
        assert "deployer" not in some.of("deployments")


async def test_a_runtime_that_is_refused_holds_up_the_rollout_of_its_pool(
    some: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its partners come to a revision without it, and no prompt is split any more. Events that
    can't be written hold up nothing.
    """

    async def create_event(*_: object) -> None:
        raise ApiError("no room for Events", status=500)

    monkeypatch.setattr(api.Api, "create_event", create_event)
    some.put(runtime("p", "prefill", replicas=3), runtime("d", "decode", replicas=3), proxy())
    async with some.operating() as operator:
        await until(lambda: len(some.of("deployments")) == 3)
        await some.calm()
        before = images(some)
        wrong = {"spec": {"containers": [{"name": "engine", "image": "mine"}]}}
        some.put(
            runtime("p", "prefill", replicas=3, image=NEW, template=wrong),
            runtime("d", "decode", replicas=3, image=NEW),
        )
        await until(lambda: "PDRuntime p is wrong" in str(some.of("pdruntimes")["d"]["status"]))
        await some.calm()
        assert images(some) == before
        assert {one["spec"]["replicas"] for one in some.of("deployments").values()} == {2, 3}
        some.put(runtime("p", "prefill", replicas=3, image=NEW))
        await until(lambda: set(images(some).values()) >= {NEW} and len(images(some)) == 3)
        assert 'reconciles_total{result="failed"} 0.0' in str(operator.answers()["/metrics"]())


async def test_an_object_that_cannot_be_read_stops_no_other(
    some: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy())
    some.api.put("old", NAMESPACE, "pdruntimes", spec={"role": ["of", "another", "version"]})
    some.api.put("older", NAMESPACE, "pdproxies")
    async with some.operating() as operator:
        await until(lambda: len(some.of("deployments")) == 3)
        lines = [one.getMessage() for one in caplog.records if "can't be read:" in one.getMessage()]
        assert any(line.startswith("PDRuntime llm/old can't be read") for line in lines)
        assert any(line.startswith("PDProxy llm/older can't be read") for line in lines)
        assert "pdproxy_operator_unreadable_objects 2.0" in str(operator.answers()["/metrics"]())
        some.put(runtime("old", "decode"))
        await until(lambda: len(some.of("deployments")) == 4)
        assert "pdproxy_operator_unreadable_objects 1.0" in str(operator.answers()["/metrics"]())


async def test_what_depends_on_an_object_that_cannot_be_read_stays_as_it_is(some: Cluster) -> None:
    """Without it a pool would have another revision, and proxies would lose engines."""
    some.put(
        runtime("p", "prefill"),
        runtime("d", "decode"),
        runtime("alone", "aggregated", own_labels={"model": "other"}),
        proxy(),
    )
    async with some.operating():
        await until(lambda: len(some.of("deployments")) == 4)
        await some.calm()
        before = {key: one for key, one in some.shown().items() if not key[0].startswith("pd")}
        whole = some.of("pdruntimes")["d"]
        labels = {"labels": whole["metadata"]["labels"]}
        some.api.put("d", NAMESPACE, "pdruntimes", metadata=labels, spec={"role": 1})
        selector = {"matchLabels": {"model": "other"}}
        some.api.put("second", NAMESPACE, "pdproxies", spec={"runtimeSelector": selector})
        said = "The PDRuntime d can't be read, so nothing is changed."
        await until(lambda: said in str(some.of("pdproxies")["pdproxy"]["status"]))
        some.put(runtime("p", "prefill", image=NEW))
        some.put(runtime("alone", "aggregated", own_labels={"model": "other"}, image=NEW))
        await some.calm()
        after = {key: one for key, one in some.shown().items() if not key[0].startswith("pd")}
        assert after == before
        some.put(runtime("d", "decode", image=NEW))
        some.api.delete("second", NAMESPACE, "pdproxies")
        await until(lambda: {*images(some).values()} == {NEW, "pdproxy:0.1.0"})


async def test_a_rollout_waits_until_the_proxies_were_asked(
    some: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each start of an operator replaces engines whose successors no proxy can use."""

    async def never(_: pages.Pages) -> None:
        await asyncio.sleep(3600)

    some.put(runtime("p", "prefill", replicas=3), runtime("d", "decode", replicas=3), proxy())
    async with some.operating():
        await until(lambda: len(some.of("deployments")) == 3)
        await some.calm()
    before = images(some)
    some.put(
        runtime("p", "prefill", replicas=3, image=NEW),
        runtime("d", "decode", replicas=3, image=NEW),
    )
    with monkeypatch.context() as patch:
        patch.setattr(pages.Pages, "run", never)
        async with some.operating():
            await until(lambda: len(some.of("deployments")) == 5)
            await some.calm()
            counts = {name: some.of("deployments")[name]["spec"]["replicas"] for name in before}
            assert set(counts.values()) == {2, 3}, "two proxies, and three engines of each role"
    async with some.operating():
        await until(lambda: len(some.of("deployments")) == 3 and NEW in images(some).values())


async def test_definitions_that_are_newer_have_objects_read_again(some: Cluster) -> None:
    """Their defaults change what the API server gives, and not its version."""
    some.put(runtime("p", "prefill"))
    made = some.of("pdruntimes")["p"]
    role = made["spec"].pop("role")
    async with some.operating() as operator:
        await until(lambda: "unreadable_objects 1.0" in str(operator.answers()["/metrics"]()))
        made["spec"]["role"] = role
        some.api.forget()
        some.api.version += 1
        some.api.cut()
        await until(lambda: "unreadable_objects 0.0" in str(operator.answers()["/metrics"]()))


async def test_a_cluster_without_an_api_has_the_rest(some: Cluster) -> None:
    some.api.absent = {"leaderworkersets", "httproutes", "podmonitors"}
    route = {"parentRefs": [{"name": "gateway"}], "hostnames": []}
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy(route=route))
    async with some.operating():
        await until(lambda: some.of("pdproxies")["pdproxy"].get("status"))
        await some.calm()
        conditions = str(some.of("pdproxies")["pdproxy"]["status"]["conditions"])
        assert "This cluster has no HTTPRoute (gateway.networking.k8s.io/v1)." in conditions
        assert len(some.of("deployments")) == 2, "of engines alone"


async def test_an_operator_that_has_lost_its_lease_writes_nothing_and_ends(
    some: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EVERY", 0.05)
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy())
    operator = some.operator(leader_elect=True)
    task = asyncio.create_task(operator.run())
    try:
        await until(lambda: len(some.of("deployments")) == 3)
        await until(lambda: "pdproxy_operator_leader 1.0" in str(operator.answers()["/metrics"]()))
        ((name, held),) = some.of("leases").items()
        taken = {**held, "spec": {**held["spec"], "holderIdentity": "another"}}
        taken["metadata"] = {**held["metadata"]}
        some.api._store(("leases", "default", name), taken)
        assert await asyncio.wait_for(task, 30) == 1
        assert "pdproxy_operator_leader 0.0" in str(operator.answers()["/metrics"]())
        with pytest.raises(ApiError, match="does not act any more"):
            await operator._api.scale(DEPLOYMENTS, NAMESPACE, "pdproxy", 1)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_works_in_its_namespaces_alone(some: Cluster) -> None:
    some.put(runtime("p", "prefill"), runtime("d", "decode"), proxy())
    async with some.operating(namespaces=("other", "another")):
        await until(lambda: some.api.answered["watch"] > 20)
        await some.calm()
        assert some.api.written == []
        assert all("/namespaces/" in path for path, query in some.api.asked if query)
    async with some.operating(namespaces=("other", NAMESPACE)):
        await until(lambda: len(some.of("deployments")) == 3)


def change(of: Cluster, chance: random.Random) -> None:
    """Have a user change something."""
    image = chance.choice((NEW, "vllm/vllm-openai:v0.32.0"))
    counts = [chance.randrange(1, 4) for _ in range(2)]
    of.put(
        runtime("p", "prefill", image=image, replicas=counts[0]),
        runtime("d", "decode", image=image, replicas=counts[1]),
        proxy(replicas=chance.randrange(1, 4)),
    )
    if chance.random() < 0.3:
        of.put(runtime("alone", "aggregated", own_labels={}))
    elif ("pdruntimes", NAMESPACE, "alone") in of.api.objects and chance.random() < 0.3:
        of.api.delete("alone", NAMESPACE, "pdruntimes")


def last(of: Cluster) -> None:
    """Have what a user wants in the end."""
    of.put(
        runtime("p", "prefill", image=NEW, replicas=2),
        runtime("d", "decode", image=NEW, replicas=3),
        proxy(config={"limits": {"max_inflight": 100}}),
        runtime("alone", "aggregated", own_labels={}),
    )


async def test_an_operator_that_is_killed_again_and_again_converges(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with cluster(tmp_path / "a") as some:
        last(some)
        async with some.operating():
            await until(lambda: len(some.of("deployments")) == 4)
            await some.calm()
        wanted = some.shown()
    chance = random.Random(7)
    async with cluster(tmp_path / "b") as some:
        for _ in range(KILLS):
            change(some, chance)
            await some.killed_at_random(chance, 600)
        last(some)
        async with some.operating():
            await until(lambda: some.shown() == wanted)
            await some.calm()
        found = some.shown()
        for key in found.keys() | wanted.keys():
            assert found.get(key) == wanted.get(key), key
