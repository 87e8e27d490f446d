"""Generated requests on real engines: 1P1D behind the proxy answers as the plain engine does."""

# `PDPROXY_TEST_GENERATED_REAL` is their number, and each run generates new ones; without it each
# run sends the same few. The generator is that of the simulated engines, where thousands are sent
# and compared as bytes.

import asyncio
import json
import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from tests.differential.dialect import Dialect
from tests.differential.generate import Generated, requests

from .client import Answer, ask
from .compare import differs, mask
from .engine import BLOCK, CONTEXT, MODEL
from .fleet import Fleet
from .proxy import Proxy

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800, func_only=True)]

COUNT = int(os.environ.get("PDPROXY_TEST_GENERATED_REAL", "30"))


def dialect_of(fleet: Fleet) -> Dialect:
    """Return what may be asked of the engines of a fleet."""
    vocabulary = json.loads((fleet.launcher.built.model / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    return Dialect(
        model=MODEL,
        block_size=BLOCK,
        max_model_len=CONTEXT,
        vocab_size=len(vocabulary),
        ids=(300, 4000),
        eos=vocabulary["<|eos|>"],
        half=vocabulary["Ã"],  # how a byte-level vocabulary writes the byte 0xC3
        long_prompt=600,
        longest_answer=24,
    )


def test_generated_requests_are_answered_as_by_the_plain_engine(
    fleet: Fleet, proxy_1p1d: Proxy
) -> None:
    """For each request the proxy's answer equals the plain engine's."""
    compare_generated(fleet, proxy_1p1d, requests(dialect_of(fleet)), COUNT)


def compare_generated(
    fleet: Fleet, proxy: Proxy, wanted: SearchStrategy[Generated], count: int
) -> None:
    """Send so many requests to the plain engine and to the proxy. Fail at a difference."""

    @settings(
        max_examples=count,
        deadline=None,
        derandomize="PDPROXY_TEST_GENERATED_REAL" not in os.environ,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(one=wanted)
    def check(one: Generated) -> None:
        why = asyncio.run(_difference(fleet.plain.url, proxy.url, one))
        if why:
            pytest.fail(f"{one!r}\n{why}")

    check()


async def _difference(plain_url: str, proxy_url: str, wanted: Generated) -> str:
    """Return the first difference between the answers of a plain engine and of the proxy, "" where
    there is none.
    """
    plain, other = await asyncio.gather(
        *(
            ask(url, wanted.path, wanted.body.encode(), dict(wanted.headers))
            for url in (plain_url, proxy_url)
        )
    )
    if plain.status == 500 and "kv_transfer_params" in wanted.body:
        # A handle that is no object causes a 500 in an engine; the proxy drops a client's handle
        # (docs/reference/differences.md).
        return "" if other.status == 200 else f"{other.status} {other.body!r}"
    if (error := _streamed_error(plain)) is not None:
        several = isinstance(json.loads(wanted.body).get("prompt"), list)
        if other.status == 200 and (several or plain.chunks[0] != error):
            # One engine ends such a stream with [DONE] after the error, the proxy ends it with the
            # error (docs/reference/differences.md). Which of several prompts sends its data first
            # is random.
            said = mask(other.chunks[-1]) == mask(error) and not other.body.rstrip().endswith(
                b"[DONE]"
            )
        else:
            said = (other.status, mask(other.json)) == (error["error"]["code"], mask(error))
        return "" if said else f"{error} != {other.status} {other.body!r}"
    return differs(plain, other, strict=False, warm=True)


def _streamed_error(plain: Answer) -> dict | None:
    """Return the error event of a stream; None if there is none."""
    chunks = plain.chunks if plain.streamed and plain.status == 200 else []
    return next((chunk for chunk in chunks if "error" in chunk), None)
