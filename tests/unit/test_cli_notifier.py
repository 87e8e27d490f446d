"""`pdproxy notifier`: the file comes out whole, and the flags beside it are vLLM's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from pdproxy.cli.main import main

SOURCE = Path("proxy/pdproxy/notifier/pdproxy_nixl.py")


@pytest.fixture(autouse=True)
def _repository(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    monkeypatch.chdir(pytestconfig.rootpath)


def _configs(advice: str) -> dict[str, dict[str, object]]:
    """The transfer configs by role, read as a shell would."""
    found = {}
    for line in advice.splitlines():
        if match := re.match(r"  (prefill|decode): +(PYTHONPATH=.*)", line):
            words = shlex.split(match[2])
            assert words[1:4] == ["vllm", "serve", "..."]
            assert words[4] == "--kv-transfer-config"
            found[match[1]] = json.loads(words[5]) | {"path": words[0]}
    return found


def test_it_prints_the_file_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output can be piped into a file on another machine; the advice is beside it."""
    assert main(["notifier"]) == 0
    printed = capsys.readouterr()
    assert printed.out == SOURCE.read_text()
    assert {role: config["kv_role"] for role, config in _configs(printed.err).items()} == {
        "prefill": "kv_producer",
        "decode": "kv_consumer",
    }


def test_it_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that isn't there is made, one with blanks is quoted, and an older file is
    replaced.
    """
    folder = tmp_path / "a b" / "c"
    for _ in range(2):
        assert main(["notifier", "--out", str(folder), "--notify", "tcp://x:1", "tcp://y:2"]) == 0
        assert (folder / "pdproxy_nixl.py").read_text() == SOURCE.read_text()
        (folder / "pdproxy_nixl.py").write_text("old")
    config = _configs(capsys.readouterr().out)["decode"]
    assert config["path"] == f"PYTHONPATH={folder}"
    assert config["kv_connector_module_path"] == "pdproxy_nixl"
    assert config["kv_connector"] == "NixlConnector"
    assert config["kv_connector_extra_config"] == {"pdproxy_notify": ["tcp://x:1", "tcp://y:2"]}


def test_what_goes_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that can't be made, and an address that is none."""
    (tmp_path / "file").write_text("")
    assert main(["notifier", "--out", str(tmp_path / "file")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("pdproxy notifier: ")
    assert told.count("\n") == 1
    assert main(["notifier", "--notify", "x:7500"]) == 2
    assert "tcp://HOST:PORT" in capsys.readouterr().err
