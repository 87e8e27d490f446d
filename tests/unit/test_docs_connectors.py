"""The page of connectors says of each contract on which routes, and whether with media, its legs
run.
"""

from pathlib import Path

from pdproxy.transfer.registry import ENTRIES
from pdproxy.wire.route import Route

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "connectors.md").read_text()
HEADER = (
    "| connector | completions | chats | responses | messages | token ids | Cohere's chats | media "
    "| why not |\n"
)
ROUTES = (
    Route.COMPLETIONS,
    Route.CHAT,
    Route.RESPONSES,
    Route.MESSAGES,
    Route.GENERATE,
    Route.COHERE,
)


def test_the_table_of_what_is_split_equals_the_capabilities() -> None:
    """A row for each contract, in the order of the first table, with a reason for each no."""
    before, _, behind = PAGE.partition(HEADER)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in behind.partition("\n\n")[0].splitlines()[1:]
    ]
    said = {name.strip("`"): cells for name, *cells, _ in rows}
    assert said == {
        entry.name: [
            "yes" if can else "no"
            for can in (
                *(route in entry.capabilities.routes for route in ROUTES),
                entry.capabilities.media,
            )
        ]
        for entry in ENTRIES
    }
    assert all(bool(why) == ("no" in cells) for _, *cells, why in rows)
    firsts = [line.split("`")[1] for line in before.splitlines() if line.startswith("| `")]
    assert [name for name in firsts if name in said] == list(said)
