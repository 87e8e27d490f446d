"""Several workers take the same settings as one, and limits are divided."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.limits import Limits, least_buffered_bytes, of_each
from pdproxy.settings.listen import Listen
from pdproxy.settings.load import EngineFlag, Flag, load
from pdproxy.settings.schema import Settings, of_worker

SECOND = "nodes: [{url: 'http://x:1', role: aggregated}]"
ENGINES = (EngineFlag("prefill", "http://p:1"), EngineFlag("decode", "http://d:1"))


def _load(tmp_path: Path, text: str = "", workers: str = "2") -> Settings:
    path = tmp_path / "pdproxy.yaml"
    path.write_text(text)
    return load(path, {}, [Flag("--workers", "listen.workers", workers)], ENGINES)


@pytest.mark.parametrize(
    "connector",
    ["nixl", "nixl-push", "mooncake", "shared", "auto", "moriio", "p2p-nccl", "lmcache-mp"],
)
def test_connectors_are_accepted(tmp_path: Path, connector: str) -> None:
    assert _load(tmp_path, f"pools: [{{connector: {connector}}}]").listen.workers == 2


@pytest.mark.parametrize(
    "text",
    [
        "pools: [{policy: auto}]",
        "pools: [{turns: {bidirectional: true}}]",
        "pools: [{slo: {ttft: 1}}]",
        "pools: [{kv_events: {enabled: true}}]",
        "pools: [{kv_events: {enabled: true, host: 127.0.0.1}}]",
        "listen: {admin: 127.0.0.1:9}",
        "replicas: {count: 3}",
        "kv_ready: {notifier: true}",
        f"pools: [{{name: a}}, {{name: b, {SECOND}}}]",
        "limits: {engine_requests: auto}",
        "limits: {engine_requests: 8, engine_tokens: 8}",
    ],
)
def test_settings_of_all_kinds_are_accepted(tmp_path: Path, text: str) -> None:
    assert _load(tmp_path, text).listen.workers == 2


@pytest.mark.parametrize("wrong", ["0", "65", "many", "-1"])
def test_the_number_of_workers_is_bounded(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SettingsError, match="workers"):
        _load(tmp_path, workers=wrong)


def test_limits_are_divided() -> None:
    """Shared ones stay whole, and the largest body and answer have space in each worker."""
    limits = Limits(max_connections=101, body_readers=4, min_retries=5)
    each = of_each(limits, 4)
    assert (each.max_connections, each.body_readers) == (26, 1)
    assert each.max_buffered_bytes == least_buffered_bytes(limits)
    assert each.max_buffered_answer_bytes == limits.max_answer_bytes
    assert (each.max_inflight, each.max_queue) == (limits.max_inflight, limits.max_queue)
    assert each.min_retries == 5
    assert of_each(limits, 1) is limits
    large = msgspec.structs.replace(limits, max_buffered_bytes=1 << 40)
    assert of_each(large, 4).max_buffered_bytes == 1 << 38
    settings = Settings(listen=Listen(workers=4), limits=limits)
    assert of_worker(settings, 4).limits == each
