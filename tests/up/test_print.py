"""`pdproxy up --print`: a script whose commands and settings file are what is started."""

import json
import subprocess
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from pdproxy.settings.load import load
from tests.fakes.ports import free_port
from tests.fakes.vllm_box import GPU, VllmBox, nvidia_smi
from tests.up.test_nvidia_gpus import LISTED, TOPO

IDLE = LISTED.replace("63021", "4")


def test_the_script_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    box = VllmBox(tmp_path, look=GPU)
    nvidia_smi(tmp_path / "bin", IDLE, "", TOPO)
    for name, value in box.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    port = str(free_port())
    line = ["up", "org/model", "--slo", "ttft=500ms,tpot=15ms", "--print", "--port", port]
    line += ["--max-inflight", "77", "--", "--max-model-len", "4096", "--chat-template", "a b's"]
    assert main(line) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["sh", "-n"], input=script.encode(), check=False).returncode == 0
    assert "# GPUs 0, 1: NVIDIA H200, 140.4 GiB each." in script
    text = script.partition("'END_OF_SETTINGS'\n")[2].partition("\nEND_OF_SETTINGS")[0]
    (tmp_path / "pdproxy.yaml").write_text(text)
    settings = load(tmp_path / "pdproxy.yaml", {})
    assert (settings.listen.port, settings.limits.max_inflight) == (int(port), 77)
    assert settings.pools[0].slo.ttft == 0.5
    assert [node.role for node in settings.pools[0].nodes] == ["any", "any"]
    # the shell itself says which words a command has
    engines = [part for part in script.split("\n\n") if part.startswith("# any-")]
    for number, engine in enumerate(engines):
        command = engine.partition("\n")[2].removesuffix(" &")
        words = command.replace(str(box.vllm), f"printf '%s\\0' {box.vllm}", 1)
        said = subprocess.run(["sh", "-c", words], capture_output=True, check=True).stdout
        arguments = said.decode().split("\0")
        assert arguments[-3:-1] == ["--chat-template", "a b's"]
        transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        assert transfer["kv_role"] == "kv_both"
        assert f"CUDA_VISIBLE_DEVICES={number} " in engine
    assert len(engines) == 2
