"""Generated requests over simulated engines get the answers of one plain engine."""

# `PDPROXY_TEST_GENERATED` says how many in all, drawn anew at each run.

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import HealthCheck, given, settings

from tests.differential.generate import Generated, requests
from tests.differential.stage import SIMULATED, Stage, stage

COUNT = int(os.environ.get("PDPROXY_TEST_GENERATED", "400"))
STAGES: dict[str, dict[str, object]] = {
    "1p1d": {},
    "2p2d that reason": {"prefill": 2, "decode": 2, "reasoning_parser": "deepseek_r1"},
    "1p1d that forces usage": {"enable_force_include_usage": True},
    "1p1d without extras": {
        "enable_prompt_tokens_details": False,
        "enable_auto_tool_choice": False,
        "enable_prefix_caching": False,
        "add_bos": True,
        "template": "plain",
    },
}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module", params=STAGES)
def both(runner: asyncio.Runner, request: pytest.FixtureRequest) -> Iterator[Stage]:
    stack = AsyncExitStack()
    yield runner.run(stack.enter_async_context(stage(**STAGES[request.param])))  # type: ignore[arg-type]
    runner.run(stack.aclose())


@settings(
    max_examples=COUNT // len(STAGES),
    deadline=None,
    derandomize="PDPROXY_TEST_GENERATED" not in os.environ,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(wanted=requests(SIMULATED))
@pytest.mark.timeout(900)
def test_generated_requests_are_answered_as_by_one_engine(
    runner: asyncio.Runner, both: Stage, wanted: Generated
) -> None:
    """Whatever is asked, the proxy over two engines and one plain engine say the same, to the
    byte.
    """
    if why := runner.run(both.differs(wanted)):
        pytest.fail(why)
