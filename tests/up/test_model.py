"""The bytes of a model's weights, from folders and from the cache of downloads."""

import json
from pathlib import Path

import pytest

from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.model import read_model


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".").replace("_at_", "-")).write_text(text)
    return folder


CONFIG = {"num_attention_heads": 40, "hidden_size": 5120}


def test_the_index_says_the_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "llama-70b", config__json=CONFIG, a__safetensors="1234")
    index = {"metadata": {"total_size": 140e9}, "weight_map": {}}
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
