"""docs/guide/simulator.md lists the moments and the kinds of faults that there are."""

from pathlib import Path

from pdproxy_lab.sim.faults.kinds import KINDS
from pdproxy_lab.sim.faults.moments import MOMENTS

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "simulator.md"


def rows(header: str) -> list[list[str]]:
    """The cells of the table with this header, a list per row."""
    table = PAGE.read_text().partition(f"{header}\n")[2].partition("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]
    ]


def test_every_moment_is_described_in_order():
    assert [name.strip("`") for name, _ in rows("| moment | the instant |")] == list(MOMENTS)


def test_every_kind_is_described_as_it_is():
    expected = []
    for kind in KINDS.values():
        arguments = ", ".join(f"`{name}={str(value).lower()}`" for name, value in kind.args.items())
        expected.append([f"`{kind.name}`", f"`{kind.moments[0]}`", arguments, kind.summary])
    assert rows("| kind | default moment | arguments | what happens |") == expected
