"""Why an engine has ended, from its log."""

# The logs in tests/data/failed_engines are those of real ones (vLLM 0.32.0 on a CPU), with fewer
# frames in their tracebacks.

from pathlib import Path

import pytest

from pdproxy_lab.up.last_words import TAIL, last_lines, last_words, root_cause

LOGS = Path(__file__).parents[1] / "data" / "failed_engines"
MEMORY = (
    "ValueError: No available memory for the cache blocks. Try increasing "
    "`gpu_memory_utilization` when initializing the engine"
)
CONTEXT = (
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, "
    "User-specified max_model_len (10000000) is greater than"
)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("memory", MEMORY),
        # one of two workers has failed, then the other one, then the core, then the server
        (
            "weights",
            "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: inco",
        ),
        # the core repeats in words of its own what its worker has said
        ("kv_space", "ValueError: Available memory on node 0 (12.52/13.71 GiB) on kv cache"),
        # the server itself, with a second line that says what is wrong
        (
            "context",
            CONTEXT,
        ),
    ],
)
def test_the_root_cause_of_engines_that_did_not_start(log: str, cause: str) -> None:
    found = root_cause((LOGS / f"{log}.txt").read_text())
    assert found is not None
    assert found.startswith(cause)
    assert "\n" not in found


CORE = "(EngineCore pid=9) {} 12-01 01:48:56 [core.py:1510] {}"
TRACE = "Traceback (most recent call last):"
DEAD = f"{TRACE}\n  File 'a'\nvllm.v1.engine.exceptions.EngineDeadError: see above"


def core(*lines: str, level: str = "ERROR") -> str:
    return "\n".join(CORE.format(level, line) for line in (TRACE, "  File 'a'", *lines))


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (core("torch.OutOfMemoryError: no room"), "torch.OutOfMemoryError: no room"),
        # requests that end with the core, after it
        (f"{core('RuntimeError: CUDA error')}\n{DEAD}\n{DEAD}", "RuntimeError: CUDA error"),
        (core("AssertionError"), "AssertionError"),
        # of a chain, what was raised in the end
        (core("KeyError: 3", "During handling", TRACE, "  File", "ValueError: x"), "ValueError: x"),
        # lines of another process between those of a traceback
        (f"{TRACE}\n{core('OSError: a')}\nINFO:  Started\nValueError: b", "ValueError: b"),
        (core("ImportError: no triton", level="WARNING"), None),
        (f"Exception ignored in: <function f>\n{TRACE}\n  File 'a'\nOSError: x", None),
        ("vllm serve: error: unrecognized arguments: --no-such-flag", "vllm serve: error: unrecog"),
        (DEAD, None),
        ("ValueError: in no traceback", None),
        (f"{TRACE}\n  File 'a'\n", None),
        (core("ValueError: " + "x" * 10_000), "ValueError: " + "x" * 688),
    ],
)
def test_which_exception_counts(log: str, cause: str | None) -> None:
    found = root_cause(log)
    assert found == cause if cause is None else found is not None and found.startswith(cause)
    assert len(found or "") <= 700


def test_without_a_cause_the_last_lines_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "any-0.log"
    assert last_words("it ended", log) == f"it ended; its log, {log}, is empty"
    log.write_text('a\n\nINFO "GET /health HTTP/1.1" 200\nb\n')
    assert last_words("it ended", log) == f"it ended; its log, {log}, ends with:\na\nb"
    assert last_lines("\n".join(map(str, range(100)))) == [str(one) for one in range(85, 100)]
    log.write_text(f"{core('OSError: too old')}\n{'x' * TAIL}\n{core('OSError: disk full')}\n")
    assert last_words("it ended", log) == f"it ended: OSError: disk full\nIts log: {log}"
    log.write_text(f"{core('OSError: too old')}\n{'x' * TAIL}\n")
    assert "too old" not in last_words("it ended", log)
