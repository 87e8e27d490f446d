"""The schema, the reference file that is made of it, and the examples say the same."""

from pathlib import Path

import msgspec
import pytest

from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.keys import Auth
from pdproxy.settings.load import load
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings

CONFIGS = Path(__file__).parents[2] / "configs"
REFERENCE = CONFIGS / "reference.yaml"


def test_reference_holds_the_defaults() -> None:
    """But for its example engines, loading the reference file changes nothing."""
    nodes = (
        ConfiguredEngine(url="http://127.0.0.1:8200", role="prefill"),
        ConfiguredEngine(url="http://127.0.0.1:8300", role="decode"),
    )
    assert load(REFERENCE, {}) == Settings(pools=(Pool(nodes=nodes),))


@pytest.mark.parametrize(("name", "prefills", "decodes"), [("1p1d", 1, 1), ("2p2d", 2, 2)])
def test_examples_load(name: str, prefills: int, decodes: int) -> None:
    """The short examples are what their names say, on the loopback, with defaults for the rest."""
    settings = load(CONFIGS / f"{name}.yaml", {})
    urls = [f"http://127.0.0.1:{8200 + i}" for i in range(prefills)]
    assert [n.url for n in settings.pool.nodes if n.role == "prefill"] == urls
    urls = [f"http://127.0.0.1:{8300 + i}" for i in range(decodes)]
    assert [n.url for n in settings.pool.nodes if n.role == "decode"] == urls
    assert msgspec.structs.replace(settings, pools=()) == Settings()


def test_every_file_in_configs_loads() -> None:
    """Nobody copies an example that doesn't work."""
    for path in CONFIGS.glob("*.yaml"):
        load(path, {})


def test_settings_are_immutable_and_hold_no_list() -> None:
    """Rooms share one tree: none can change it for another."""
    settings = load(REFERENCE, {})
    with pytest.raises(AttributeError):
        settings.listen.port = 1  # type: ignore[misc]
    assert isinstance(settings.pools, tuple)
    assert isinstance(settings.pool.nodes, tuple)


def test_repr_hides_keys() -> None:
    """Settings in a log or a traceback show that there are keys, and none of them."""
    text = repr(Settings(auth=Auth(api_keys=("client-key",), engine_api_key="engine-key")))
    assert "client-key" not in text
    assert "engine-key" not in text
    assert "1 api_keys" in text
