"""The arrangement that `pdproxy plan` says for a load."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdproxy.scheduling.slo import Slo
from pdproxy_lab.up import load_plan
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.load_plan import choose
from pdproxy_lab.up.options import Load, UpOptions
from pdproxy_lab.up.prepared import prepare
from tests.fakes.vllm_box import GPU, VllmBox, nvidia_smi
from tests.up.test_nvidia_gpus import TOPO

IDLE = "".join(f"{one}, GPU-{one}, NVIDIA H200, 143771, 4, Disabled\n" for one in range(2))
OPTIONS = UpOptions(
    "org/model",
    slo=Slo(ttft=0.5, tpot=0.015),
    profile="h200-8b",
    load=Load("4000:4000", "100:100", 8.0),
    flags=("--max-num-batched-tokens", "2048"),
)


async def test_plan_itself_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = VllmBox(tmp_path, look=GPU)
    nvidia_smi(tmp_path / "bin", IDLE, "", TOPO)
    for name, value in box.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    plan = (await prepare(OPTIONS, str(box.vllm), (), os.environ, listens=False)).plan
    words = "\n".join(plan.reasons)
    assert "`pdproxy plan` for this load: " in words
    assert "  This keeps ttft=500ms,tpot=15ms for 90 % of the requests up to " in words
    assert "  Why: the best " in words
    assert "auto / best static = " in words
    assert plan.roles in ({"aggregated"}, {"prefill", "decode"}, {"any"})
    assert set(plan.chunks.values()) == {2048}


@pytest.fixture
def stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A program in the place of `pdproxy plan`; it notes its options."""

    def made(
        best: dict[str, Any] | None,
        said: str = "Split.\nIt keeps it.\n\ntable",
        code: int = 0,
        **more: Any,
    ) -> Path:
        program, noted = tmp_path / "plan.py", tmp_path / "noted"
        program.write_text(
            "import sys, time\n"
            f"open({str(noted)!r}, 'w').write(' '.join(sys.argv[2:]))\n"
            f"file = sys.argv[sys.argv.index('--json') + 1]\n"
            f"open(file, 'w').write({json.dumps({'plan': best, **more})!r})\n"
            f"print({said!r})\n"
            f"time.sleep({60 if code < 0 else 0})\n"
            f"sys.exit({code})\n"
        )
        monkeypatch.setattr(load_plan, "PDPROXY", (sys.executable, str(program)))
        return noted

    return made


def best(
    prefill: int, decode: int, aggregated: int, chunk: int, other: int | None, some: int = 0
) -> Any:
    return {
        "any": some,
        "prefill": prefill,
        "decode": decode,
        "aggregated": aggregated,
        "max_num_batched_tokens": chunk,
        "prefill_max_num_batched_tokens": other,
    }


@pytest.mark.parametrize(
    ("plan", "arrangement", "chunks"),
    [
        (best(3, 5, 0, 512, 8192), "3P5D", {"prefill": 8192, "decode": 512}),
        (best(0, 0, 8, 1024, None), "8A", {"aggregated": 1024}),
        (best(0, 0, 0, 4096, None, 8), "any", {"any": 4096}),
        (None, "auto", {}),
    ],
)
async def test_its_answer_is_used(
    stands_in: Callable[..., Path], plan: Any, arrangement: str, chunks: dict[str, int]
) -> None:
    noted = stands_in(plan, code=0 if plan else 1)
    found = await choose(OPTIONS, 8)
    assert (found.arrangement, found.chunks) == (arrangement, chunks)
    assert found.reasons == ("`pdproxy plan` for this load: Split.", "  It keeps it.")
    words: Sequence[str] = noted.read_text().split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert Path(given.pop("--json")).parent.exists() is False
    assert given == {
        "--gpus": "8",
        "--seeds": "1",
        "--slo": "ttft=500ms,tpot=15ms",
        "--profile": "h200-8b",
        "--input-tokens": "4000:4000",
        "--output-tokens": "100:100",
        "--rate": "8.0",
        "--chunks": "2048",
    }


async def test_what_the_answer_rests_on_is_shown(stands_in: Callable[..., Path]) -> None:
    beyond = {"beyond": {}, "off": {}, "lines": ["The profile was not", "fitted to it."]}
    stands_in(best(0, 0, 8, 1024, None), extrapolated=beyond)
    found = await choose(OPTIONS, 8)
    assert found.arrangement == "8A"
    assert found.reasons[2:] == ("  The profile was not", "  fitted to it.")


async def test_wrong_options_are_told_and_a_late_answer_is_done_without(
    stands_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stands_in(None, said="pdproxy plan: --profile: no such profile", code=2)
    with pytest.raises(UpError, match=r"^--profile: no such profile$") as refused:
        await choose(OPTIONS, 8)
    assert refused.value.code == 2
    monkeypatch.setattr(load_plan, "DEADLINE", 0.5)
    stands_in(None, code=-1)
    found = await choose(OPTIONS, 8)
    assert found.arrangement == "auto"
    assert found.reasons == (
        "The arrangement is not chosen for the load: pdproxy plan took more than 0 s.",
    )
