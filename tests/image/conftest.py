"""The machine of these tests, with the images of this checkout."""

from collections.abc import Iterator

import pytest

from tests.image.machine import FOLDER, Machine


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """A machine that has built the images."""
    assert (FOLDER / "complete").exists(), f"no {FOLDER}: .ci/containers makes it"
    with Machine() as made:
        made.build()
        yield made
