"""Tenants' caches: what engines get as `cache_salt`, and that no tenant finds what another one has
sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.app.salt_warnings import salt_warnings
from pdproxy.observe.events import TurnKept, TurnReused
from pdproxy.serving.access.routes import ENTRIES
from pdproxy.settings.dns import ReplicaSettings
from pdproxy.settings.keys import Auth, TenantSettings
from pdproxy.settings.pools import Pool, PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes import several
from tests.fakes.client import bearer
from tests.fakes.files import renewed
from tests.fakes.passed import BODIES, MESSAGES, PATHS, RESPONSES, everyone, fine
from tests.fakes.pool import pool
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, World, chat, completion, until, world
from tests.proxy.kv_events import ANY, prompt
from tests.proxy.prefixes import knowing
from tests.proxy.test_connectors import TEXT
from tests.proxy.test_quotas import keys
from tests.proxy.test_tenants import overload, trusting
from tests.proxy.test_turns import IDS, talking

TWO: dict[str, Any] = {"api_keys": ("sk-a", "sk-b")}
SECRET = "0123456789abcdef0123456789abcdef"
BATCH, INVOCATIONS = "/v1/chat/completions/batch", "/invocations"
GENERATING: dict[str, Callable[..., dict[str, Any]]] = {
    COMPLETIONS: completion,
    CHAT: chat,
    BATCH: lambda **fields: chat(messages=[chat()["messages"], chat()["messages"]], **fields),
    INVOCATIONS: chat,
}
SPLIT_KINDS = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"stream": True}),
    (COMPLETIONS, {"prompt": [PROMPT, PROMPT + "x"]}),
    (COMPLETIONS, {"n": 2, "temperature": 1}),
    (CHAT, {}),
    (CHAT, {"stream": True}),
    (BATCH, {}),
    (BATCH, {"n": 1, "seed": "unusual"}),
    (INVOCATIONS, {}),
    (INVOCATIONS, {"temperature": "hot"}),
]


def tenants(**fields: Any) -> Callable[[Settings], Settings]:
    return lambda settings: msgspec.structs.replace(settings, tenants=TenantSettings(**fields))


def salts(w: World) -> list[str | None]:
    """Those of all legs that engines have got since the last call: not of what the proxy asks them
    for itself.
    """
    journals = [engine.sim.journal for engine in w.engines]
    kept = [
        one
        for journal in journals
        for one in (*journal.requests, *journal.others)
        if one.method == "POST"
    ]
    for journal in journals:
        journal.requests.clear()
        journal.others.clear()
    own = ("tokenize", "render", "count_tokens")
    return [one.json.get("cache_salt") for one in kept if not one.path.endswith(own)]


async def salt(w: World, key: str, path: str = COMPLETIONS, **fields: Any) -> str:
    """The one salt of all legs of a request."""
    salts(w)
    answer = await w.ask(path, GENERATING[path](**fields), bearer(key))
    assert answer.status == 200, answer.body
    (found,) = set(salts(w))
    assert found is not None
    return found


# -- what engines get


@pytest.mark.parametrize(("path", "fields"), SPLIT_KINDS, ids=str)
async def test_both_legs_have_the_tenants_salt(path: str, fields: dict[str, Any]) -> None:
    """On every route, however it is served: 64 hexadecimal digits, which say nothing of the key."""
    async with world(auth=TWO, leaves=True) as w:
        made = {}
        for key in ("sk-a", "sk-b"):
            salts(w)
            await w.ask(path, GENERATING[path](**fields), bearer(key))
            got = [one for one in salts(w) if one is not None]
            assert got
            assert len(set(got)) == 1
            made[key] = got[0]
        assert made["sk-a"] != made["sk-b"]
        assert all(len(one) == 64 and set(one) <= set("0123456789abcdef") for one in made.values())
        assert hashlib.sha256(b"sk-a").hexdigest() != made["sk-a"]
        assert await salt(w, "sk-a") == made["sk-a"], "on all routes the same"
        await w.quiet()


@pytest.mark.parametrize("path", PATHS)
async def test_passed_routes_have_it_where_prompts_are_computed(path: str) -> None:
    async with world(0, 1, auth=TWO) as w:
        seen = everyone(w, path, fine)
        body = BODIES.get(path, {"model": "tiny", "input": PROMPT, "prompt": PROMPT})
        for key in ("sk-a", "sk-b", "sk-a"):
            assert (await w.ask(path, {**body, "cache_salt": "mine"}, bearer(key))).status == 200
        got = [one.json.get("cache_salt") for one in seen]
        if ENTRIES[path].computes:
            assert got[0] == got[2] != got[1]
            assert not {"mine", None} & set(got)
        else:
            assert got == ["mine"] * 3, "as it came: no cache has to do with it"


async def test_a_clients_own_salts_stay_apart_and_within_its_tenant() -> None:
    """Whatever it sends: also what another tenant's engines have got."""
    async with world(auth=TWO) as w:
        a, b = await salt(w, "sk-a"), await salt(w, "sk-b")
        own = [await salt(w, "sk-a", cache_salt=one) for one in ("x", "y", "x", b, a)]
        assert own[0] == own[2]
        assert len({a, b, *own}) == 6
        assert (
            len({await salt(w, "sk-b", cache_salt=one) for one in ("x", a, b)} | {a, b, *own}) == 9
        )
        assert await salt(w, "sk-a", cache_salt=None) == a


WRONG = [5, "", {}, [], True, 0.5, {"x": "y"}, ["x"]]
WRONG_TEXTS = ["x" * 129, "a@b", "a/b", "a\\b", "a\0b", "x" * 5000]


@pytest.mark.parametrize("caches", ["separate", "shared"])
@pytest.mark.parametrize("path", [*GENERATING, RESPONSES, MESSAGES])
async def test_what_is_no_text_reaches_no_engine(path: str, caches: str) -> None:
    """Engines before vLLM 0.30.0 crash of it. The others refuse it, and texts of their own alphabet
    alone, in these words.
    """
    async with world(auth=TWO, adjust=tenants(caches=caches)) as w:
        body = GENERATING[path]() if path in GENERATING else BODIES[path]
        wrong = WRONG if caches == "shared" else [*WRONG, *WRONG_TEXTS]
        for one in [each for each in wrong if caches != "shared" or each != ""]:
            answer = await w.ask(path, {**body, "cache_salt": one}, bearer("sk-a"))
            assert answer.status == 400, one
            assert answer.json["error"]["message"].startswith("Parameter 'cache_salt' must be")
        assert salts(w) == []


@pytest.mark.parametrize("one", [5, "", "a@b", "x" * 129, {"a": 1}])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_it_is_refused_as_an_engine_refuses_it(path: str, one: object) -> None:
    async with pool("nixl", auth=Auth(**TWO)) as pair:
        body = {**GENERATING[path](), "cache_salt": one}
        ours, plain = await pair.ask(path, body, bearer("sk-a")), await pair.asked_plain(path, body)
        assert (ours.status, ours.json) == (plain.status, plain.json)
        assert ours.status == 400


@pytest.mark.parametrize(
    "body",
    [b'{"cache\\u005fsalt":"x","prompt":"%s"}', b'{"cache_salt":"x","prompt":"%s","top_p":NaN}'],
)
async def test_however_the_body_is_written(body: bytes) -> None:
    async with world(auth=TWO, leaves=True) as w:
        body = body % json.dumps(PROMPT)[1:-1].encode()
        await w.ask(COMPLETIONS, body, [*bearer("sk-a"), ("content-type", "application/json")])
        (got,) = set(salts(w))
        assert got == await salt(w, "sk-a", cache_salt="x")
        await w.quiet()


# -- who is a tenant


async def test_a_name_of_keys_is_a_tenant(tmp_path: Path) -> None:
    """A key without a name is one by itself, wherever its line is."""
    path = tmp_path / "keys"
    async with world(auth=keys(tmp_path, "a:sk-1\na:sk-2\nb:sk-3\nsk-4\nsk-5")) as w:
        found = [await salt(w, f"sk-{number}") for number in range(1, 6)]
        assert found[0] == found[1]
        assert len(set(found)) == 4
        renewed(path, "sk-5\nsk-4\nb:sk-3\na:sk-1")
        w.look_at_files()
        assert [await salt(w, f"sk-{number}") for number in (1, 3, 4, 5)] == [found[0], *found[2:]]


async def test_auto_is_separate_where_there_are_several(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    async with world(auth=keys(tmp_path, "a:sk-1\na:sk-2")) as w:
        await w.ask(COMPLETIONS, completion(), bearer("sk-1"))
        await w.ask(COMPLETIONS, completion(cache_salt="mine"), bearer("sk-2"))
        assert set(salts(w)) == {None, "mine"}
        renewed(path, "a:sk-1\nb:sk-2")
        w.look_at_files()
        assert await salt(w, "sk-1") != await salt(w, "sk-2")
        separate = await salt(w, "sk-2")
        renewed(path, "b:sk-2")
        w.look_at_files()
        assert await salt(w, "sk-2") == separate, "engines still have what the other one has sent"


@pytest.mark.parametrize(("first", "second"), [("a:sk-1", "b:sk-2"), ("sk-1", "sk-2")])
async def test_auto_stays_separate_where_one_tenant_takes_the_place_of_another(
    tmp_path: Path, first: str, second: str
) -> None:
    """Their keys are never valid together, but the engines keep what the first one has sent."""
    path = tmp_path / "keys"
    async with world(auth=keys(tmp_path, first)) as w:
        await w.ask(COMPLETIONS, completion(), bearer("sk-1"))
        assert set(salts(w)) == {None}
        renewed(path, second)
        w.look_at_files()
        assert await salt(w, "sk-2") is not None


async def test_another_key_of_the_same_name_is_no_other_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    async with world(auth=keys(tmp_path, "a:sk-1")) as w:
        renewed(path, "a:sk-2")
        w.look_at_files()
        await w.ask(COMPLETIONS, completion(), bearer("sk-2"))
        assert set(salts(w)) == {None}


async def test_without_keys_all_share_unless_told_otherwise() -> None:
    async with world() as w:
        await w.ask(COMPLETIONS, completion())
        assert set(salts(w)) == {None}
    async with world(adjust=tenants(caches="separate")) as w:
        await w.ask(COMPLETIONS, completion())
        assert None not in salts(w)
    async with world(auth=TWO, adjust=tenants(caches="shared")) as w:
        await w.ask(COMPLETIONS, completion(cache_salt="x"), bearer("sk-a"))
        assert set(salts(w)) == {"x"}


async def test_who_names_a_tenant_stays_within_its_key() -> None:
    """Otherwise a client would name another one's tenant, and find its KV."""
    async with world(auth=TWO, adjust=overload(tenant_header="X-Tenant")) as w:
        found: list[Any] = []
        for key, name in (
            ("sk-a", None),
            ("sk-a", "t"),
            ("sk-a", "u"),
            ("sk-b", "t"),
            ("sk-b", None),
        ):
            salts(w)
            await w.ask(
                COMPLETIONS,
                completion(),
                [*bearer(key), *([] if name is None else [("x-tenant", name)])],
            )
            found += set(salts(w))
        assert len(found) == len(set(found)) == 5


async def test_behind_a_trusted_proxy_the_header_alone_counts() -> None:
    async with world(adjust=trusting(tenant_header="X-Tenant")) as w:
        found: list[Any] = []
        for name, address in (
            ("t", "1.1.1.1"),
            ("t", "2.2.2.2"),
            ("u", "1.1.1.1"),
            ("", "1.1.1.1"),
            ("", "2.2.2.2"),
        ):
            salts(w)
            await w.ask(
                COMPLETIONS, completion(), [("x-tenant", name), ("x-forwarded-for", address)]
            )
            found += set(salts(w))
        assert found[0] == found[1]
        assert len(set(found)) == 4


# -- the secret


async def test_replicas_with_one_secret_salt_alike(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    found = []
    for fields in ({"secret": SECRET}, {"secret_file": str(path)}, {"secret": SECRET[::-1]}, {}):
        async with world(auth=TWO, adjust=tenants(**fields)) as w:
            found.append(await salt(w, "sk-a"))
            if "secret_file" in fields:
                renewed(path, SECRET[::-1])
                w.look_at_files()
                found.append(await salt(w, "sk-a"))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert len(set(found)) == 3


async def test_all_workers_salt_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "WORKERS", 3)
    async with world(auth=TWO, leaves=True) as w:
        assert len(w.workers) == 3
        identifiers = [one.front.path.identify for one in w.workers]
        made = {identify._tenants.salt("x") for identify in identifiers}
        assert len(made) == 3, "each has its own objects"
        assert len({bytes(one._usual) for one in made if one is not None}) == 1
        assert len({await salt(w, "sk-a") for _ in range(12)}) == 1
        await w.quiet()


def test_what_an_operator_is_told() -> None:
    """Stores that do not know salts, and replicas that make different ones."""

    class Separate:
        separate = True

    def said(connector: str, replicas: int = 1, **fields: Any) -> list[str]:
        settings = Settings(
            pools=(Pool(connector=connector),),
            replicas=ReplicaSettings(count=replicas),
            tenants=TenantSettings(**fields),
        )
        return salt_warnings(settings, Separate())  # type: ignore[arg-type]

    assert [
        len(said(one)) for one in ("nixl", "lmcache-mp", "kvstore-keys", "shared", "lmcache-pd")
    ] == [0, 0, 0, 1, 1]
    assert "secret_file" in said("nixl", 2)[0]
    assert said("nixl", 2, secret=SECRET) == []


# -- what tenants find


async def ask(pair: Any, key: str, path: str, fields: dict[str, Any]) -> int:
    """The tokens that engines have found in their caches for a request, by their own counters."""
    engines = [one.engine.stats for one in (pair.p, pair.d)]
    before = [(one.prefix_cache_hits, one.external_prefix_cache_hits) for one in engines]
    assert (await pair.ask(path, fields, bearer(key))).status == 200
    await until(lambda: not pair.world.busy())
    # What D has of P is no hit of a cache: P has made it for this request.
    return sum(one.prefix_cache_hits - hits for one, (hits, _) in zip(engines, before, strict=True))


@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": TEXT, "max_tokens": 4}),
        (CHAT, {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}),
        (BATCH, {"messages": [[{"role": "user", "content": TEXT}]], "max_tokens": 4}),
        (INVOCATIONS, {"prompt": TEXT, "max_tokens": 4}),
        (RESPONSES, {"input": TEXT, "max_output_tokens": 4}),
        (MESSAGES, {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}),
        ("/generative_scoring", {"query": TEXT, "items": ["x"], "label_token_ids": [1]}),
    ],
)
async def test_equal_prompts_of_two_tenants(
    connector: str, path: str, body: dict[str, Any]
) -> None:
    """No engine finds one's KV for the other one; each finds its own, the whole blocks of it."""
    async with pool(connector, auth=Auth(**TWO)) as pair:
        body = {"model": "tiny", **body}
        assert await ask(pair, "sk-a", path, body) == 0
        assert await ask(pair, "sk-b", path, body) == 0
        assert await ask(pair, "sk-a", path, body) > 100
        assert await ask(pair, "sk-b", path, body) > 100


async def test_cached_tokens_are_ones_own() -> None:
    async with pool(
        "nixl", everybody={"enable_prompt_tokens_details": True}, auth=Auth(**TWO)
    ) as pair:

        async def cached(key: str) -> int:
            answer = await pair.ask(COMPLETIONS, completion(prompt=TEXT, echo=True), bearer(key))
            return (answer.json["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)

        for _ in range(2):
            await cached("sk-a")
        assert await cached("sk-b") < 100 < await cached("sk-a")


async def test_kv_stores_under_keys_of_the_proxy() -> None:
    """The proxy makes the names of KV, and a tenant's are its own."""
    async with pool("kvstore-keys", auth=Auth(**TWO)) as pair:
        found: list[Any] = []
        for key in ("sk-a", "sk-b", "sk-a"):
            assert (await pair.ask(COMPLETIONS, completion(prompt=IDS), bearer(key))).status == 200
            stored = pair.p.journal.requests[-1].json["kv_transfer_params"]["kvcache_store_keys"]
            loaded = pair.d.journal.requests[-1].json["kv_transfer_params"]["kvcache_load_keys"]
            assert stored == loaded
            found += stored
        assert found[0] == found[2] != found[1]


# -- what the proxy itself knows of prompts


async def test_turns_that_are_kept_are_ones_own() -> None:
    """The next prompt of the same conversation, by another tenant: nothing is pulled, and the turn
    stays for its own.
    """
    async with talking(auth=Auth(**TWO)) as pair:
        for key, end, used in (("sk-a", (), 0), ("sk-b", (5,), 0), ("sk-a", (5,), 1)):
            body = {"model": "tiny", "prompt": [*IDS, *end], "max_tokens": 8, "temperature": 0}
            before = len(pair.world.events(TurnKept))
            assert (await pair.ask(COMPLETIONS, body, bearer(key))).status == 200
            await until(lambda before=before: len(pair.world.events(TurnKept)) > before)  # type: ignore[misc]
            assert len(pair.world.events(TurnReused)) == used


@pytest.mark.parametrize("basis", ["events", "routing", "text"])
async def test_what_is_known_of_caches_is_ones_own(basis: str) -> None:
    """Two engines: the second tenant's prompt is not drawn to the one that has the first one's, and
    no hit is expected of it.
    """
    async with knowing(2, ANY if basis == "events" else None, auth=Auth(**TWO)) as known:
        text = "All ships that came in, and what they carried. " * 20
        path = "/v1/chat/completions" if basis == "text" else "/v1/completions"
        sent: object = [{"role": "user", "content": text}] if basis == "text" else prompt(1)
        for key in ("sk-a", "sk-a", "sk-b", "sk-b", "sk-a", "sk-b"):
            await known.ask(sent, path, key=key)
            await known.settled()
        hits = [sim.engine.stats.prefix_cache_hits for sim in known.sims]
        assert known.predictions("too_high", basis) == 0
        if basis != "text":
            assert known.all(basis) == (6, 0, 0)
            assert sum(hits) == 4 * 96


async def homes(w: World, key: str, headers: Sequence[tuple[str, str]], **fields: Any) -> set[str]:
    """The prefill engines that eight requests of a session came to."""
    before = {engine.url: len(engine.requests) for engine in w.prefill}
    for number in range(8):
        body = completion(prompt=f"{number} {PROMPT}", **fields)
        assert (await w.ask(COMPLETIONS, body, [*bearer(key), *headers])).status == 200
    return {engine.url for engine in w.prefill if len(engine.requests) > before[engine.url]}


@pytest.mark.parametrize("by", ["header", "user"])
async def test_sessions_of_two_tenants_are_two(by: str) -> None:
    """Equal names of conversations lead to engines of their own, as different names do."""

    def adjust(settings: Settings) -> Settings:
        replace, (own,) = msgspec.structs.replace, settings.pools
        chosen = PoolPolicy(prefill="session", decode="session")
        return replace(settings, pools=(replace(own, policy=chosen),))

    async with world(
        4, 1, auth={"api_keys": tuple(f"sk-{n}" for n in range(8))}, adjust=adjust
    ) as w:
        found: list[Any] = []
        for number in range(8):
            headers = [("x-session-id", "one")] if by == "header" else []
            fields = {} if by == "header" else {"user": "one"}
            home = await homes(w, f"sk-{number}", headers, **fields)
            assert len(home) == 1
            found += home
        assert len(set(found)) > 1


async def test_responses_are_nobodys() -> None:
    """None is stored: an id of another tenant's response is as one that never was, and so is one's
    own.
    """
    async with world(0, 1, auth=TWO) as w:
        made = (await w.ask(RESPONSES, BODIES[RESPONSES], bearer("sk-a"))).json["id"]
        for ident in (made, "resp_never"):
            answers = []
            for key in ("sk-a", "sk-b"):
                after = {**BODIES[RESPONSES], "previous_response_id": ident}
                answers += [
                    await w.ask(RESPONSES, after, bearer(key)),
                    await w.get(f"{RESPONSES}/{ident}", bearer(key)),
                    await w.ask(f"{RESPONSES}/{ident}/cancel", {}, bearer(key)),
                    await w.ask(f"{RESPONSES}/{ident}", b"", bearer(key), method="DELETE"),
                ]
            assert {one.status for one in answers} <= {404, 405}
            bodies = [one.body.replace(ident.encode(), b"*") for one in answers]
            assert bodies[:4] == bodies[4:]


async def test_decisions_are_not_shown() -> None:
    """A predicted time tells how much others have engines do. It is shown where all share the
    caches anyway.
    """
    asks = [("x-pdproxy-decision", "1"), ("x-pdproxy-timing", "1")]
    async with world(auth=TWO) as w:
        answer = await w.ask(COMPLETIONS, completion(), [*bearer("sk-a"), *asks])
        assert answer.header("x-pdproxy-decision") is None
        # durations that the client waits for anyway, and no engine's name
        shown = answer.header("server-timing") or ""
        assert "prefill;dur=" in shown
        assert "127.0.0.1" not in shown
    async with world(auth=TWO, adjust=tenants(caches="shared")) as w:
        answer = await w.ask(COMPLETIONS, completion(), [*bearer("sk-a"), *asks])
        assert answer.header("x-pdproxy-decision")
