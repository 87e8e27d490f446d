"""The benchmark of tenants' caches: what it finds is what can be computed by hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import tenants as benchmark


@pytest.mark.parametrize("tenants", [1, 4])
def test_each_separate_tenant_computes_the_system_prompt_once_per_engine(tenants: int) -> None:
    """Requests that come one after another, on two prefill engines: the common beginning is 8 units
    of ten.
    """
    arguments = argparse.Namespace(system=2048, question=512, requests=400, rate=1.0)
    shared = benchmark.in_virtual_time("shared", tenants, arguments)[0]
    separate = benchmark.in_virtual_time("separate", tenants, arguments)[0]
    first = {found: round((0.8 - found) * 400 / 0.8) for found in (shared, separate)}
    assert 1 <= first[shared] <= 2
    assert tenants <= first[separate] <= 2 * tenants
