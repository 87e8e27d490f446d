"""A schema-driven test of all operations: schemathesis makes requests of `/openapi.json` and judges
the answers.
"""

# Needs `st`.

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.world import world

EXAMPLES = os.environ.get("PDPROXY_TEST_OPENAPI", "20")
# Which values are accepted is for the engine to say: a schema that says as much would be wrong with
# another engine.
LEFT_OUT = "positive_data_acceptance"


@pytest.mark.timeout(3600)
async def test_schemathesis_finds_nothing(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Broken heads, wrong types, missing fields, other methods: no status, media type or body that
    the document does not name.
    """
    program = shutil.which("st")
    assert program is not None, "schemathesis is not installed"
    async with world(leaves=True, facts={"max_model_len": 256}) as w:  # no answer takes long
        url = f"http://127.0.0.1:{w.port}/openapi.json"
        options = (
            "--max-examples",
            EXAMPLES,
            "--exclude-checks",
            LEFT_OUT,
            "--suppress-health-check",
            "all",
            "--no-color",
        )
        more = (
            "--request-timeout",
            "120",
            "--wait-for-schema",
            "60",
            "--generation-database",
            "none",
        )
        process = await asyncio.create_subprocess_exec(
            program, "run", url, *options, *more, cwd=tmp_path
        )
        assert await process.wait() == 0, capfd.readouterr().out
    told = capfd.readouterr().out
    with capfd.disabled():
        print(
            "\n".join(
                line
                for line in told.splitlines()
                if "generated" in line or "Tested" in line or "Seed" in line
            )
        )
