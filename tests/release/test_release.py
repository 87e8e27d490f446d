"""A tree that is not ready is not released, and a release names its image by the digest."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.reference.markdown import ROOT
from tests.release import by_digest, check, description, version

OWN = version.current()
CHANGELOG = (
    f"# Changelog\n\n## {OWN} - 2026-12-01\n\n- A change.\n\n## 0.0.1 - 2026-01-01\n\nFirst.\n"
)
NOW = description.written(description.described())
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
SOURCES = "https://example.com/team/pdproxy"
IMAGE = f"registry.example.com/team/pdproxy@{DIGEST}"


def test_a_tree_that_is_ready_is_released_with_its_notes() -> None:
    assert check.wrong(f"v{OWN}", CHANGELOG, NOW, SOURCES) == []
    assert check.notes(f"v{OWN}", CHANGELOG) == "- A change."


@pytest.mark.parametrize(
    ("tag", "changelog", "described", "why"),
    [
        ("v99.0.0", f"{CHANGELOG}## 99.0.0 - 2026-01-01\n\n- A.\n", NOW, "the tag is v99.0.0, and"),
        (f"v{OWN}", CHANGELOG.replace("A change", ""), NOW, ""),
        (f"v{OWN}", CHANGELOG.replace(" - 2026-12-01", ""), NOW, "CHANGELOG.md has no section"),
        (f"v{OWN}", f"## Unreleased\n\n- B.\n\n{CHANGELOG}", NOW, "changes under `## Unreleased`"),
        (f"v{OWN}", CHANGELOG, NOW.replace("8000", "80"), "released.json is not of this tree"),
    ],
)
def test_what_keeps_a_tree_from_a_release(
    tag: str, changelog: str, described: str, why: str
) -> None:
    found = check.wrong(tag, changelog, described, SOURCES)
    assert [why in one for one in found] == [True] * bool(why)


def test_a_tree_without_an_address_of_its_sources_is_not_released() -> None:
    (found,) = check.wrong(f"v{OWN}", CHANGELOG, NOW, "")
    assert "no Source under [project.urls]" in found


def test_charts_and_compose_name_the_image_by_its_digest(tmp_path: Path) -> None:
    """The charts that are packed, whose other values are as before."""
    by_digest.package(IMAGE, tmp_path)
    names = [f"pdproxy-{OWN}.tgz", f"pdproxy-operator-{OWN}.tgz", "compose.yaml"]
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(names)
    for name, chart in zip(names, by_digest.CHARTS, strict=False):
        with tarfile.open(tmp_path / name) as opened:
            member = opened.extractfile(f"{name.removesuffix(f'-{OWN}.tgz')}/values.yaml")
            assert member is not None
            packed = yaml.safe_load(io.TextIOWrapper(member))
        before = yaml.safe_load((ROOT / "configs" / chart / "values.yaml").read_text())
        image = {"repository": "registry.example.com/team/pdproxy", "digest": DIGEST}
        assert packed == {**before, "image": {**before["image"], **image}}
    services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    images = {one["image"] for one in services.values()}
    assert {one for one in images if not one.startswith("vllm/")} == {IMAGE}
    assert not any("build" in one or "pull_policy" in one for one in services.values())


@pytest.mark.parametrize("image", ["pdproxy:1.0.0", "pdproxy@sha256:0123", f"a b@{DIGEST}"])
def test_an_image_without_a_digest_is_refused(image: str) -> None:
    with pytest.raises(ValueError, match="expected REPOSITORY@sha256:"):
        by_digest.values((ROOT / "configs/chart/values.yaml").read_text(), image)


def test_values_without_a_place_for_a_digest_are_refused() -> None:
    with pytest.raises(ValueError, match="0 places in place of one"):
        by_digest.values("image:\n  repository: pdproxy\n", IMAGE)
    with pytest.raises(ValueError, match="0 places in place of one"):
        by_digest.compose("services: {}\n", IMAGE)
