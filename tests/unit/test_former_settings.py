"""A settings file of 0.1 is read, or refused with the line to change and what to write there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdproxy.settings.engines import EngineFlag
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import load
from tests.reference.markdown import ROOT

ENGINE = "nodes: [{url: 'http://a:1', role: aggregated}]"


def test_the_file_of_the_first_version_is_read() -> None:
    """All its settings are what they were."""
    settings = load(ROOT / "tests" / "data" / "settings_0.1.yaml", {})
    assert [node.role for node in settings.pools[0].nodes] == ["prefill", "decode"]
    assert settings.limits.attempts == 3


@pytest.mark.parametrize(
    ("text", "key", "now", "line"),
    [
        (
            f"pools:\n- {ENGINE}\n\noutliers:\n  # seconds\n  eject_for: 30\n",
            *("outliers.eject_for", "outliers.exclude_for", 6),
        ),
        (
            f"pools:\n- {ENGINE}\n  prefixes:\n    heal: false\n",
            *("pools[0].prefixes.heal", "pools[0].prefixes.refresh", 4),
        ),
    ],
)
def test_a_former_name_is_refused_with_its_line(
    text: str, key: str, now: str, line: int, tmp_path: Path
) -> None:
    """And the name of now is right there."""
    file = tmp_path / "pdproxy.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load(file, {})
    sentence = f"{key}: is called {now} now: change line {line} (file {file})"
    assert caught.value.mistakes == (sentence,)
    file.write_text(text.replace(key.rpartition(".")[2], now.rpartition(".")[2]))
    load(file, {})


def test_a_former_variable_is_refused_with_the_name_of_now() -> None:
    with pytest.raises(SettingsError, match=r"did you mean PDPROXY_OUTLIERS__EXCLUDE_FOR\?"):
        load(
            None,
            {"PDPROXY_OUTLIERS__EJECT_FOR": "3"},
            engines=[EngineFlag("aggregated", "http://a:1")],
        )
