"""Memory of large bodies is used again, not given back and cleared for each of them."""

import subprocess
import sys

PROGRAM = """
import resource
from pdproxy.kit import kept_memory
{keep}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        bodies = [b"x" * 600_000 for _ in range(8)]
        del bodies
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def faults(keep: str) -> int:
    """How many pages a process was given for 50 times eight bodies, behind the first ones."""
    program = [sys.executable, "-c", PROGRAM.format(keep=keep)]
    return int(subprocess.run(program, capture_output=True, check=True, text=True).stdout)


def test_pages_are_kept() -> None:
    assert faults("") > 50 * 8 * 600_000 // 4096 // 2, "this C library needs no help"
    assert faults("kept_memory.keep()") < 500
