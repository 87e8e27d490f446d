"""Which Python vLLM's program belongs to."""

import os
import sys
from pathlib import Path

import pytest

from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.vllm import interpreter_of


def test_the_interpreter_is_the_scripts_own(tmp_path: Path) -> None:
    script, beside = tmp_path / "vllm", tmp_path / "python"
    script.write_text("#!/usr/bin/env python3\n")
    with pytest.raises(UpError, match="can't tell which Python"):
        interpreter_of(script)
    beside.touch()
    assert interpreter_of(script) == beside
    script.write_text(f"#!{sys.executable} -s\n")
    assert interpreter_of(script) == Path(sys.executable)
    link = tmp_path / "elsewhere"
    link.mkdir()
    os.symlink(script, link / "vllm")
    assert interpreter_of(link / "vllm") == Path(sys.executable)
