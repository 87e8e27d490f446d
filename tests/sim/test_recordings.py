"""The simulator answers what real engines were recorded to answer: every recording is replayed, or
it says here why not.
"""

from contextlib import AsyncExitStack

import pytest

from tests.sim.recordings import pages
from tests.sim.recordings.reading import names, read
from tests.sim.recordings.scenes import scene_of
from tests.sim.recordings.stage import Stage

NAMES = names()
NOT_SPOKEN = {
    "connector_bidir_01": "KV that goes back from decode to prefill (bidirectional_kv_xfer)",
    "connector_bidir_02_tokens": "KV that goes back from decode to prefill (bidirectional_kv_xfer)",
    "connector_kv_events_agg": "KV events (ZMQ), no HTTP",
    "connector_kv_events_bytes_hash": "KV events (ZMQ), no HTTP",
    "connector_kv_events_http": (
        "its requests were recorded in part (3000 characters), what they show is shown by pd*"
    ),
    "connector_kv_events_pd": "KV events (ZMQ), no HTTP",
    "connector_lmcache_proxynotif": "LMCache's notices (ZMQ), no HTTP",
    "connector_mix_01": "a push engine paired with a pull engine",
    "connector_mooncake_01": "Mooncake's connector",
    "connector_notify": "what a notifier inside vLLM told, no HTTP",
    "connector_push_01": "NixlPushConnector",
    "connector_push_02_bad": "NixlPushConnector",
    "connector_push_03_timeout": "NixlPushConnector",
    "connector_push_04_new_D_random_engine_id": "NixlPushConnector",
}
"""Recordings that are not kept here: the simulator has no such contract, or there is nothing to
send.
"""


def _marked(name):
    broken = pytest.mark.broken_bodies("recorded to see how engines refuse it")
    return pytest.param(name, marks=broken) if "bad_json" in name else name


@pytest.mark.parametrize("name", map(_marked, NAMES))
async def test_the_simulator_answers_as_recorded(name):
    async with AsyncExitStack() as stack:
        await scene_of(name)(Stage(stack), name)


def test_no_recording_is_left_out_in_silence():
    assert len(NAMES) == 138
    assert not set(NAMES) & set(NOT_SPOKEN)
    for name in NAMES:
        assert scene_of(name) is not None


# -- what is not in an answer's body


@pytest.mark.parametrize("name", pages.ROLES)
async def test_metrics_come_with_the_recorded_head(name):
    async with AsyncExitStack() as stack:
        assert not await pages.unlike_heads(Stage(stack), name)


@pytest.mark.parametrize("name", pages.ROLES)
async def test_histograms_have_the_recorded_bounds(name):
    async with AsyncExitStack() as stack:
        assert not await pages.unlike_bounds(Stage(stack), name)


async def test_prefill_and_decode_have_one_fingerprint():
    def fingerprint(answer):
        return answer.json["system_fingerprint"]

    prefill, decode = (read(name) for name in ("pd14_P_no_kv_params", "pd15_D_no_kv_params"))
    assert fingerprint(prefill.answer) == fingerprint(decode.answer), "the recorded ones had one"
    async with AsyncExitStack() as stack:
        stage = Stage(stack)
        p, d = await stage.engine("prefill"), await stage.engine("decode")
        assert fingerprint(await stage.ask(p, prefill.sent)) == fingerprint(
            await stage.ask(d, decode.sent)
        )
