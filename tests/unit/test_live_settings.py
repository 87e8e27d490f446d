"""Each setting, changed while a proxy runs: the parts that use it have the new value, or it is
named as needing a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.app.live import LiveSettings
from pdproxy.fleet.member import MembershipError
from pdproxy.kit.errors import UnauthorizedError
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.settings.changes import changes
from pdproxy.settings.conform import leaves
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import KeyPath, SettingsError, spell_key
from pdproxy.settings.keys import Auth
from pdproxy.settings.kv import KvEvents
from pdproxy.settings.limits import Limits
from pdproxy.settings.pools import Pool, PoolPolicy
from pdproxy.settings.schema import Settings
from pdproxy.settings.section import fields_of, is_section
from tests.fakes.admitted import admission_of
from tests.fakes.tokenizer import Shelf

NODES = (
    ConfiguredEngine(url="http://p:8000", role="prefill"),
    ConfiguredEngine(url="http://d:8000", role="decode"),
)


def _client(name: str) -> Callable[[Proxy], object]:
    return lambda proxy: getattr(proxy.engines["http://p:8000"].client, name)


def _resource(name: str) -> Callable[[Proxy], object]:
    return lambda proxy: getattr(proxy.pools[0].resources.deadlines, name)


def _kind(role: Role) -> Callable[[Proxy], object]:
    return lambda proxy: type(proxy.ledger._policies[role]).__name__


def _check_key(proxy: Proxy) -> object:
    proxy.credentials.keys.check(b"Bearer new")
    with pytest.raises(UnauthorizedError):
        proxy.credentials.keys.check(b"Bearer old")
    return True


def _check_admin_key(proxy: Proxy) -> object:
    proxy.credentials.admin_keys.check(b"Bearer new")
    with pytest.raises(UnauthorizedError):
        proxy.credentials.admin_keys.check(b"Bearer former")
    return True


def _readers(proxy: Proxy) -> object:
    return set(proxy.front.answers().operators.readers())


def _engine_key(proxy: Proxy) -> object:
    return proxy.engines["http://p:8000"].credentials.key()


def _placement(name: str) -> Callable[[Proxy], object]:
    return lambda proxy: getattr(proxy.ledger.placement, name)


LIVE: dict[str, tuple[object, Callable[[Proxy], object], object]] = {
    # a setting: another value, where it is seen in force, and what is seen
    "auth.api_keys": (("new",), _check_key, True),
    "auth.api_keys_file": ("file of keys", _check_key, True),
    "auth.admin_keys": (("new",), _check_admin_key, True),
    "auth.admin_keys_file": ("file of keys", _check_admin_key, True),
    "auth.reader_key_digests": (("0" * 64,), _readers, {"0" * 64}),
    "auth.engine_api_key": ("theirs", _engine_key, "theirs"),
    "auth.engine_api_key_file": ("file of a key", _engine_key, "fresh"),
    "deadlines.connect": (9.5, _client("_connect_timeout"), 9.5),
    "deadlines.client_head": (9.5, lambda p: p.front.bounds.head_timeout, 9.5),
    "deadlines.client_body": (9.5, lambda p: p.front.bounds.body_timeout, 9.5),
    "deadlines.read_body": (9.5, lambda p: p.bodies._deadlines.read_body, 9.5),
    "deadlines.queue": (
        9.5,
        lambda p: (admission_of(p)._timeout, p.buffers._deadlines.queue),
        (9.5, 9.5),
    ),
    "deadlines.tokenize": (
        9.5,
        lambda p: p.pools[0].resources.tokenizing._deadlines.tokenize,  # type: ignore[union-attr]
        9.5,
    ),
    "deadlines.encode": (9.5, _resource("encode"), 9.5),
    "deadlines.prefill": (
        9.5,
        lambda p: (p.pools[0].resources.deadlines.prefill, p.stalls.deadlines.prefill),
        (9.5, 9.5),
    ),
    "deadlines.kv_ready": (9.5, _resource("kv_ready"), 9.5),
    "deadlines.kv_replay": (9.5, lambda p: p.kv_events.sources.parts.deadlines.kv_replay, 9.5),  # type: ignore[union-attr]
    "deadlines.first_token": (9.5, _resource("first_token"), 9.5),
    "deadlines.between_tokens": (
        9.5,
        lambda p: [
            p.pools[0].resources.derendering._deadlines.between_tokens,  # type: ignore[union-attr]
            _resource("between_tokens")(p),
        ],
        [9.5, 9.5],
    ),
    "deadlines.stream_comment": (9.5, _resource("stream_comment"), 9.5),
    "deadlines.continuation": (9.5, _resource("continuation"), 9.5),
    "deadlines.websocket_idle": (9.5, _resource("websocket_idle"), 9.5),
    "deadlines.client_write": (9.5, lambda p: p.front.bounds.slow_readers.seconds, 9.5),
    "deadlines.abandoned_prefill": (9.5, lambda p: p.custodian.orphans._timeout(), 9.5),  # type: ignore[misc]
    "deadlines.release": (0.5, lambda p: p.custodian.drain_timeout, 10.5),
    "deadlines.retry": (
        9.5,
        lambda p: (p.retries._deadlines.retry, p.pools[0].resources.not_retried().retry_after),
        (9.5, 9.5),
    ),
    "deadlines.drain": (9.5, lambda p: p.settings.deadlines.drain, 9.5),
    "deadlines.engine_drain": (9.5, lambda p: p.membership._deadlines.engine_drain, 9.5),
    "deadlines.unacknowledged": (9.5, _client("_unacknowledged"), 9.5),
    "deadlines.total": (
        9.5,
        lambda p: (p.pools[0].resources.deadlines.total, p.front.bounds.longest_body),
        (9.5, 9.5),
    ),
    "deadlines.probe": (9.5, lambda p: p.admin.deadlines.probe, 9.5),
    "limits.max_inflight": (
        7,
        lambda p: (admission_of(p).places, p.retries.limits.max_inflight),
        (7, 7),
    ),
    "limits.max_queue": (7, lambda p: admission_of(p)._queue.max_waiting, 7),
    "limits.max_inflight_tokens": (7, lambda p: admission_of(p)._queue._max_size, 7),
    "limits.max_connections": (99, lambda p: p.connections.max_open, 99),
    "limits.max_body_bytes": (
        99,
        lambda p: (p.front.path.max_body, p.front.asgi.max_body),
        (99, 99),
    ),
    "limits.max_body_items": (50_000, lambda p: p.bodies._bounds.items, 50_000),
    "limits.max_prompts": (7, lambda p: p.bodies._bounds.prompts, 7),
    "limits.body_readers": (7, lambda p: p.bodies.workers._turns._max_places, 7),
    "limits.max_buffered_bytes": (2**27, lambda p: p.body_budget._max_bytes, 2**27),
    "limits.max_answer_bytes": (99, lambda p: p.answer_budget.share()._limit, 99),
    "limits.max_buffered_answer_bytes": (
        2**28 + 1,
        lambda p: (p.answer_budget.max_total, p.unread_answers.max_bytes),
        (2**28 + 1, 2**28 + 1),
    ),
    "limits.max_header_bytes": (999, lambda p: p.front.bounds.max_header_bytes, 999),
    "limits.min_send_rate": (7, lambda p: p.front.bounds.min_send_rate, 7),
    "limits.min_read_rate": (7, lambda p: p.front.bounds.slow_readers.min_rate, 7),
    "limits.continuations": (7, lambda p: p.pools[0].resources.limits.continuations, 7),
    "limits.engine_requests": (
        7,
        lambda p: (admission_of(p).places, p.pools[0].capacity._windows.fixed),  # type: ignore[union-attr]
        (1024, 7),
    ),
    "limits.engine_tokens": (7, lambda p: p.pools[0].capacity._tokens, 7),  # type: ignore[union-attr]
    "limits.attempts": (7, lambda p: p.pools[0].resources.limits.attempts, 7),
    "limits.retry_share": (0.7, lambda p: p.retries.limits.retry_share, 0.7),
    "limits.min_retries": (7, lambda p: p.retries.limit, 7),
    "limits.engine_keepalive": (9.5, _client("_keepalive"), 9.5),
    "limits.breaker_failures": (7, lambda p: p.ledger.breakers._failures, 7),
    "limits.breaker_cooldown": (9.5, lambda p: p.ledger.breakers._cooldown, 9.5),
    "overload.tenant_header": ("X-Who", lambda p: p.front.tenants._header, b"x-who"),
    "overload.weights": ({"a": 3.0}, lambda p: p.front.tenants._weights, {"a": 3.0}),
    "overload.output_weight": (9.5, lambda p: admission_of(p)._output_weight, 9.5),
    "media.urls": ("any", lambda p: p.bodies._bounds.media.urls, "any"),
    "media.hosts": (("a",), lambda p: p.bodies._bounds.media.hosts, ("a",)),
    "media.embeds": (True, lambda p: p.bodies._bounds.media.embeds, True),
    "overload.priority": ("ignore", lambda p: admission_of(p)._by_priority, False),
    "tenants.caches": ("separate", lambda p: p.front.tenants.salt("x") is not None, True),
    "health.stalled_after": (9.5, lambda p: p.stalls.health.stalled_after, 9.5),
    "health.canary_timeout": (
        9.5,
        lambda p: p.pools[0].watching.canary._health.canary_timeout,
        9.5,
    ),
    "health.canary_interval": (9.5, lambda p: p.stalls.health.canary_interval, 9.5),
    "health.slow_start": (9.5, lambda p: p.ledger.breakers._slow_start, 9.5),
    "outliers.interval": (9.5, lambda p: p.exclusions._settings.interval, 9.5),
    "outliers.error_share": (0.7, lambda p: p.pools[0].watching.outliers.limits.error_share, 0.7),
    "outliers.min_requests": (7, lambda p: p.pools[0].watching.outliers.limits.min_requests, 7),
    "outliers.slower_than": (9.5, lambda p: p.pools[0].watching.outliers.limits.slower_than, 9.5),
    "outliers.exclude_for": (9.5, lambda p: p.pools[0].watching.outliers.limits.exclude_for, 9.5),
    "outliers.max_share": (0.7, lambda p: p.pools[0].watching.outliers.limits.max_share, 0.7),
    "probes.interval": (0.5, lambda p: p.prober._probes.interval, 0.5),
    "probes.scrape_interval": (
        20.0,
        lambda p: (p.prober._scrape_every(), p.pools[0].bootstraps._probes.scrape_interval),
        (10, 20.0),
    ),
    "observe.log_level": ("debug", lambda p: p.settings.observe.log_level, "debug"),
    "pools[0].nodes": (
        (*NODES[1:], ConfiguredEngine(url="dns://e:8000", role="decode")),
        lambda p: ([*p.engines], [name for name, _ in p.tasks.failures() if "://" in name]),
        (["http://d:8000"], ["dns://e:8000"]),
    ),
    "pools[0].models": (("a*",), lambda p: p.models.choose("abc", None), (0, "abc")),
    "pools[0].aliases": (
        {"fast": "tiny"},
        lambda p: p.pools[0].service.routes.of("fast", None)[1],  # type: ignore[union-attr]
        "tiny",
    ),
    "pools[0].alone": (512, lambda p: p.ledger.alone_up_to, 512),
    "pools[0].weight": (3.0, lambda p: p.models.pools[0].weight, 3.0),
    "pools[0].policy.prefill": ("round_robin", _kind(Role.PREFILL), "RoundRobin"),
    "pools[0].policy.decode": ("session", _kind(Role.DECODE), "Session"),
    "pools[0].policy.session_header": ("X-Chat", lambda p: p.service.session_header, "X-Chat"),
    "pools[0].policy.refuse_late": (True, _placement("_refuses"), True),
    "pools[0].slo.ttft": (9.5, lambda p: p.ledger.placement.slo.ttft, 9.5),  # type: ignore[union-attr]
    "pools[0].slo.tpot": (
        9.5,
        lambda p: (p.ledger.placement.slo.tpot, p.ledger.wanted.slo.tpot),  # type: ignore[union-attr]
        (9.5, 9.5),
    ),
    "pools[0].slo.gap": (9.5, lambda p: p.ledger.placement.slo.gap, 9.5),  # type: ignore[union-attr]
    "pools[0].slo.long_prompt": (9, lambda p: p.ledger.placement.slo.long_prompt, 9),  # type: ignore[union-attr]
    "pools[0].slo.long_weight": (9.5, lambda p: p.ledger.placement.slo.long_weight, 9.5),  # type: ignore[union-attr]
}


def paths() -> Iterator[KeyPath]:
    """Return the paths of all settings. A list of engines is one."""
    for path, _ in leaves(Settings):
        if path[0] != "pools":
            yield path
    for path, _ in leaves(Pool):
        yield ("pools", 0, *path)
    yield ("pools", 0, "nodes")


def changed(tree: Any, path: KeyPath, value: object) -> Any:
    """Return settings with one changed."""
    if not path:
        return value
    first, *rest = path
    if isinstance(first, int):
        return tuple(
            changed(one, tuple(rest), value) if at == first else one for at, one in enumerate(tree)
        )
    return msgspec.structs.replace(
        tree, **{first: changed(getattr(tree, first), tuple(rest), value)}
    )


def settings(**pool: Any) -> Settings:
    """Return settings with all parts that may be there."""
    own = {
        "tokenize": "always",
        "kv_events": KvEvents(enabled=True),
        "policy": PoolPolicy(placement="auto"),
        **pool,
    }
    return Settings(
        auth=Auth(api_keys=("old",), admin_keys=("former",)),
        limits=Limits(engine_requests="auto", engine_tokens=9000),
        pools=(Pool(nodes=NODES, **own),),
    )


def test_the_table_has_every_setting_that_is_used_at_once() -> None:
    def marked(kind: Any, before: str) -> Iterator[str]:
        for field in fields_of(kind):
            if is_section(field.type):
                yield from marked(field.type, f"{before}{field.name}.")
            elif field.live is not None:
                yield f"{before}{field.name}"

    assert {*marked(Settings, ""), *marked(Pool, "pools[0].")} == set(LIVE)


@pytest.mark.parametrize(
    "path", [path for path in paths() if spell_key(path) not in LIVE], ids=spell_key
)
def test_what_needs_a_restart_is_named(path: KeyPath) -> None:
    """And its old value stays."""
    old = settings()
    found = changes(old, changed(old, path, object() if path[-1] != "placement" else "split"))
    assert (found.used, found.at_once, found.restart) == (old, (), (spell_key(path),))


@pytest.mark.parametrize("name", LIVE)
async def test_a_setting_is_used_at_once(name: str, tmp_path: Path) -> None:
    """The parts that use it have the new value, and no other setting's value has changed."""
    (tmp_path / "file of keys").write_text("new\n")
    (tmp_path / "file of a key").write_text("fresh\n")
    path = next(one for one in paths() if spell_key(one) == name)
    value, read, seen = LIVE[name]
    if isinstance(value, str) and value.startswith("file of"):
        value = str(tmp_path / value)
    split = PoolPolicy(placement="split", prefill="prefix", decode="random")
    old = (
        settings(policy=split)
        if name.startswith("pools[0].policy.") and "late" not in name
        else settings()
    )
    if name == "pools[0].policy.prefill":
        old = settings(policy=msgspec.structs.replace(split, decode="prefix"))
    new = changed(old, path, value)
    if name in ("auth.api_keys_file", "auth.admin_keys_file"):
        new = changed(new, ("auth", name.removeprefix("auth.").removesuffix("_file")), ())
    found = changes(old, new)
    assert (found.restart, name in found.at_once) == ((), True)
    levels: list[str] = []
    proxy = Proxy.build(old, Shelf())
    try:
        LiveSettings(proxy, levels.append).use(old, found.used)
        if name == "pools[0].nodes":
            await proxy.tasks.settle(5)
        assert read(proxy) == seen
        assert levels == (["debug"] if name == "observe.log_level" else [])
    finally:
        await proxy.stop()


@pytest.mark.parametrize("what", ["an engine", "a file of keys"])
async def test_all_or_nothing(what: str, tmp_path: Path) -> None:
    """What can't be used keeps all else from being used."""
    old = settings()
    proxy = Proxy.build(old, Shelf())
    live = LiveSettings(proxy, lambda _: None)
    new = changed(changed(old, ("limits", "max_inflight"), 7), ("auth", "engine_api_key"), "theirs")
    if what == "an engine":
        proxy.membership.add(ConfiguredEngine(url="http://e:8000", role="decode"), "admin")
        other = ConfiguredEngine(url="http://e:8000", role="decode", labels={"rack": "2"})
        new = changed(
            new,
            ("pools", 0, "nodes"),
            (*NODES, ConfiguredEngine(url="http://f:8000", role="decode"), other),
        )
    else:
        new = changed(new, ("auth", "api_keys_file"), str(tmp_path / "missing"))
    before = [*proxy.engines]
    try:
        with pytest.raises(MembershipError if what == "an engine" else SettingsError):
            live.use(old, new)
        assert [*proxy.engines] == before
        assert (admission_of(proxy).places, _engine_key(proxy)) == (1024, None)
        proxy.credentials.keys.check(b"Bearer old")
        live.use(old, changed(old, ("limits", "max_inflight"), 8))
        assert admission_of(proxy).places == 8
    finally:
        await proxy.stop()


async def test_pools_change_together(tmp_path: Path) -> None:
    """An engine that can't be had in one pool keeps the other pool as it is; then each gets its
    own.
    """
    d, e, f = (ConfiguredEngine(url=f"http://{name}:8000", role="decode") for name in "def")
    old = Settings(pools=(Pool(name="a", nodes=(d,)), Pool(name="b", nodes=(e,))))
    proxy = Proxy.build(old, Shelf())
    live = LiveSettings(proxy, lambda _: None)
    missing = msgspec.structs.replace(e, api_key_file=str(tmp_path / "missing"))
    more = changed(old, ("pools", 0, "nodes"), (d, f))
    try:
        with pytest.raises(SettingsError, match="missing"):
            live.use(old, changed(more, ("pools", 1, "nodes"), (missing,)))
        await proxy.tasks.settle(5)
        assert [[*parts.engines] for parts in proxy.pools] == [[d.url], [e.url]]
        live.use(old, changed(more, ("pools", 1, "weight"), 0.5))
        assert [[*parts.engines] for parts in proxy.pools] == [[d.url, f.url], [e.url]]
        assert [parts.models.weight for parts in proxy.pools] == [1.0, 0.5]
    finally:
        await proxy.stop()


async def test_an_engine_moves_to_another_pool_once_it_is_gone() -> None:
    """Until then it is refused, and it stays where it is: what is kept of an engine is kept by its
    URL.
    """
    d, e, f = (ConfiguredEngine(url=f"http://{name}:8000", role="decode") for name in "def")
    old = Settings(pools=(Pool(name="a", nodes=(d, f)), Pool(name="b", nodes=(e,))))
    proxy = Proxy.build(old, Shelf())
    live = LiveSettings(proxy, lambda _: None)
    without = changed(old, ("pools", 0, "nodes"), (d,))
    moved = changed(without, ("pools", 1, "nodes"), (e, f))
    try:
        with pytest.raises(
            SettingsError, match="is an engine of another pool, or is still leaving it"
        ):
            live.use(old, moved)
        assert proxy.pools[0].membership.members[f.url].drain is None
        live.use(old, without)
        with pytest.raises(SettingsError, match="still leaving"):
            live.use(without, moved)
        await proxy.tasks.settle(5)
        live.use(without, moved)
        assert [[*parts.engines] for parts in proxy.pools] == [[d.url], [e.url, f.url]]
    finally:
        await proxy.stop()


async def test_the_defaults_of_the_settings_stay() -> None:
    """Sections that are not given are the same objects in all settings: a proxy changes its own."""
    old = settings()
    proxy = Proxy.build(old, Shelf())
    try:
        LiveSettings(proxy, lambda _: None).use(old, changed(old, ("deadlines", "total"), 7.0))
        assert proxy.settings.deadlines.total == 7.0
        assert (old.deadlines.total, Settings().deadlines.total) == (3600.0, 3600.0)
    finally:
        await proxy.stop()


async def test_limits_are_fitted_to_the_machine() -> None:
    """As those of the start: open files may not suffice."""
    old = settings()
    proxy = Proxy.build(old, Shelf())

    def fit(given: Settings) -> Settings:
        return changed(given, ("limits", "max_inflight"), min(3, given.limits.max_inflight))

    try:
        live = LiveSettings(proxy, lambda _: None, fit)
        more = changed(old, ("limits", "max_inflight"), 9)
        live.use(old, more)
        assert admission_of(proxy).places == 3
        live.use(more, changed(more, ("deadlines", "queue"), 9.0))
        assert admission_of(proxy).places == 3, "also where something else has changed"
    finally:
        await proxy.stop()


async def test_parts_that_are_not_there() -> None:
    """Parts that are not there are passed over."""
    old = settings(policy=PoolPolicy(), tokenize="off")
    proxy = Proxy.build(old, Shelf())
    try:
        LiveSettings(proxy, lambda _: None).use(old, changed(old, ("deadlines", "tokenize"), 7.0))
        assert proxy.pools[0].resources.tokenizing is None
        assert proxy.settings.deadlines.tokenize == 7.0
    finally:
        await proxy.stop()
