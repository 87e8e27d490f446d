"""The bytes of a model's weights, from folders, the cache of downloads, and the hub."""

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.model import Model, describe, read_model
from tests.fakes.ports import free_port


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".").replace("_at_", "-")).write_text(text)
    return folder


CONFIG = {"num_attention_heads": 40, "hidden_size": 5120}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def test_the_index_says_the_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "llama-70b", config__json=CONFIG, a__safetensors="1234")
    index = {"metadata": {"total_size": 140e9}, "weight_map": {"lm_head": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_model(f"{folder}/", {})
    assert (found.name, found.source) == ("llama-70b", str(folder))
    assert (found.weights, found.heads, found.local) == (140_000_000_000, 40, True)


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        ({"a__safetensors": "12345", "b__safetensors": "1", "pytorch_model__bin": "99999999"}, 6),
        ({"pytorch_model__bin": "123"}, 3),
        ({}, None),
    ],
)
def test_files_say_the_size_without_an_index(
    tmp_path: Path, files: dict[str, str], weights: int | None
) -> None:
    folder = write(tmp_path / "m", config__json={"text_config": CONFIG}, **files)
    found = read_model(str(folder), {})
    assert (found.weights, found.heads, found.local) == (weights, 40, weights is not None)


def test_a_name_is_looked_up_in_the_cache(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--org--m"
    assert read_model("org/m", {"HF_HOME": str(tmp_path)}).weights is None
    write(model / "refs", main="abc\n")
    write(model / "snapshots" / "abc", config__json=CONFIG, a__safetensors="12")
    for env in ({"HF_HOME": str(tmp_path)}, {"HF_HUB_CACHE": str(tmp_path / "hub")}):
        found = read_model("org/m", env)
        assert (found.source, found.name, found.weights) == ("org/m", "org/m", 2)


def test_half_a_download_is_not_on_this_machine(tmp_path: Path) -> None:
    """Its size is known, and vLLM may still ask the hub."""
    folder = write(tmp_path / "m", config__json=CONFIG, a__safetensors="1234")
    index = {"metadata": {"total_size": 8}, "weight_map": {"x": "a.safetensors", "y": "b"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_model(str(folder), {})
    assert (found.weights, found.local, found.is_estimate) == (8, False, False)


def test_without_weights_the_size_is_estimated(tmp_path: Path) -> None:
    found = read_model(str(write(tmp_path / "m", config__json=QWEN3_8B)), {})
    assert (found.size, found.local, found.is_estimate) == (
        "weights of about 15.3 GiB",
        False,
        True,
    )


class Hub:
    """A hub with one model."""

    def __init__(self) -> None:
        self.files = {"config.json": json.dumps(QWEN3_8B)}
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.asked.append(f"{request.match_info['revision']}/{name}")
        if name not in self.files:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": "c0ffee"}
        return web.Response(text=self.files[name], headers=headers)


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    found = Hub()
    app = web.Application()
    app.router.add_route("*", "/org/m/resolve/{revision}/{name}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield found
    await runner.cleanup()


INDEX = json.dumps({"metadata": {"total_size": 16381470720}, "weight_map": {"x": "a.safetensors"}})


@pytest.mark.parametrize(
    ("index", "size"),
    [(None, "weights of about 15.3 GiB"), (INDEX, "weights of 15.3 GiB")],
)
async def test_the_hub_is_asked_for_the_description_alone(
    hub: Hub, index: str | None, size: str
) -> None:
    if index is not None:
        hub.files["model.safetensors.index.json"] = index
    env = dict(os.environ)
    found = await describe(read_model("org/m", env), Path(sys.executable), "v2", env)
    assert (found.source, found.size, found.heads, found.local) == ("org/m", size, 32, False)
    assert set(hub.asked) == {"v2/config.json", "v2/model.safetensors.index.json"}


async def test_a_hub_that_does_not_answer_says_nothing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files.clear()
    env = dict(os.environ)
    unknown = read_model("org/m", env)
    assert await describe(unknown, Path(sys.executable), None, env) is unknown
    hub.asked.clear()
    other = {**env, "VLLM_USE_MODELSCOPE": "True"}
    assert await describe(unknown, Path(sys.executable), None, other) is unknown
    folder = Model("/models/m", "m")
    assert await describe(folder, Path(sys.executable), None, env) is folder
    assert hub.asked == []


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UpError, match=r"has no config\.json"):
        read_model(str(tmp_path), {})
    with pytest.raises(UpError, match="is no folder"):
        read_model(str(tmp_path / "no"), {})


def test_broken_files_say_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", config__json="[", a__safetensors="12")
    (folder / "model.safetensors.index.json").write_text('{"metadata": 3}')
    found = read_model(str(folder), {})
    assert (found.weights, found.heads) == (2, None)
