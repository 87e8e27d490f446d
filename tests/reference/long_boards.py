"""Grafana's own types know every field of the dashboards."""

# Needs the Python of an environment with grafana-foundation-sdk: PDPROXY_TEST_GRAFANA.

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.reference.boards import BOARDS
from tests.reference.markdown import ROOT

READ = textwrap.dedent(
    """
    import json, sys
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    print(JSONEncoder().encode(Dashboard.from_json(json.load(sys.stdin))))
    """
)


def unknown(board: object, read: object, at: str = "") -> list[str]:
    """Return the places of a dashboard that are not there once it was read and written again."""
    if isinstance(board, dict) and isinstance(read, dict):
        return [
            place
            for name, value in board.items()
            for place in unknown(value, read.get(name), f"{at}.{name}")
        ]
    if isinstance(board, list) and isinstance(read, list) and len(board) == len(read):
        pairs = enumerate(zip(board, read, strict=True))
        return [place for number, pair in pairs for place in unknown(*pair, f"{at}[{number}]")]
    return [] if board == read else [at]


def unknown_to_grafana(board: str) -> list[str]:
    done = subprocess.run(
        [os.environ["PDPROXY_TEST_GRAFANA"], "-c", READ],
        input=board,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return unknown(json.loads(board), json.loads(done.stdout))


@pytest.mark.parametrize("name", [board.name for board in BOARDS])
def test_grafana_knows_each_field(name: str) -> None:
    assert unknown_to_grafana(Path(ROOT / f"configs/dashboards/{name}.json").read_text()) == []


@pytest.mark.parametrize("field", ["gridPos", "legendFormat", "includeAll", "fillOpacity"])
def test_a_field_that_grafana_does_not_know_is_found(field: str) -> None:
    board = BOARDS[0].page()
    wrong = board.replace(f'"{field}"', f'"{field}s"')
    assert wrong != board
    assert any(place.endswith(f".{field}s") for place in unknown_to_grafana(wrong))
