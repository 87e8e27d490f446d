"""Ten times more requests than real engines can do, for a minute: runs only if this file is named, as in `.ci/full`.

One prefill and one decode engine, which runs `BATCH` requests at once. Goodput varies from run to run, as all do here: engines,
proxy and clients share two cores.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .engine import MODEL, Role
from .fleet import Fleet
from .launcher import Launcher
from .proxy import Proxy

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900, func_only=True)]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "overload.py"
BATCH, TOKENS, SECONDS = 8, 150, 60
NAMES: dict[str, Role] = {"loaded-p": "prefill", "loaded-d": "decode"}
LEAST_GOODPUT = 0.9
"""Part of the peak that is left at ten times the load."""
LATE = 0.25
"""Seconds behind its deadline at which the last answer may come: the proxy's clock ticks, and two cores are busy."""
PLACES: dict[str, dict[str, Any]] = {
    "as many as D runs": {"limits": {"max_inflight": BATCH}},
    "learned": {"limits": {"engine_requests": "auto"}},
}


@pytest.fixture(scope="module")
def pair(launcher: Launcher) -> Iterator[Fleet]:
    pair = Fleet(launcher, flags=f"--max-num-seqs {BATCH}")
    try:
        pair.launch(NAMES)
        yield pair
    finally:
        pair.end()


@pytest.mark.parametrize("places", PLACES)
def test_ten_times_the_load(pair: Fleet, tmp_path: Path, places: str) -> None:
    """Goodput stays near its peak, nobody waits past its deadline, keys with weights 3 and 1 get 3 to 1, the loop is in time."""
    keys, out = tmp_path / "keys", tmp_path / "found.json"
    keys.write_text("a:sk-a weight=3\nb:sk-b weight=1\n")
    settings = {"auth": {"api_keys_file": str(keys)}, **PLACES[places]}
    proxy = Proxy.start(pair.prefills, pair.decodes, tmp_path, settings=settings)
    try:
        options = {"url": proxy.url, "model": MODEL, "batch": BATCH, "tokens": TOKENS, "seconds": SECONDS, "out": out}
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        subprocess.run([sys.executable, str(BENCHMARK), *flags], check=True, timeout=600, stdout=sys.stderr)
    finally:
        assert proxy.stop() == 0, proxy.tail()
    found = json.loads(out.read_text())
    ten = found["loads"]["10.0"]
    print(
        f"\nplaces {places}: alone {found['unloaded_s']:.2f} s, goodput at 10 x {ten['goodput_per_s']:.2f} per second,"
        f" {ten['part_of_peak']:.2f} of its peak; shares {ten['shares']:.2f} to 1; {ten['late']} late;"
        f" at most {ten['most_over_s']:.3f} s over a deadline; loop p99 {found['lateness_p99_s'] * 1000:.1f} ms"
    )
    assert ten["part_of_peak"] >= LEAST_GOODPUT
    assert ten["most_over_s"] <= LATE
    assert found["lateness_p99_s"] <= 0.05
    assert 2.4 <= ten["shares"] <= 3.75
    assert not ten["failed"]
