"""The files that come from the code are current, and hold what they should."""

import re
from typing import Any

import pytest

from pdproxy.serving.access.routes import TABLE
from tests.reference import command_line, metrics, routes
from tests.reference.generate import PAGES, made
from tests.reference.markdown import COMMAND, ROOT, cell
from tests.reference.texts import docstrings, texts

AS_OF = re.compile(r"as\sof\s\[`(pdproxy [^`]+)`\]")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    """`python -m tests.reference.generate` changes nothing."""
    assert (ROOT / name).read_text() == made(name), f"{name} is stale: {COMMAND}"


def test_every_command_and_option_is_there() -> None:
    """In the command's own section, or in one that it names."""
    page = made("docs/reference/cli.md")
    sections = {of.prog: _section(page, of.prog) for of in command_line.ends(command_line.parser())}
    found = 0
    for of in command_line.ends(command_line.parser()):
        named = AS_OF.findall(sections[of.prog])
        text = "".join(sections[prog] for prog in (of.prog, *named))
        actions = [one for group in of._action_groups for one in command_line.shown(group)]
        for name in (name for one in actions for name in one.option_strings):
            assert f"{name} " in text or f"{name}`" in text or f"{name}," in text, (of.prog, name)
            found += 1
    assert found > 200


def _section(page: str, prog: str) -> str:
    return page.partition(f"\n## {prog}\n")[2].partition("\n## ")[0]


def test_what_commands_have_in_common_is_there_once() -> None:
    page = made("docs/reference/cli.md")
    assert page.count("`--stage-config FILE`") == 1
    assert page.count("`--host HOST` (`listen.host`)") == 1
    assert AS_OF.findall(_section(page, "pdproxy health")) == ["pdproxy serve"]


def test_a_label_of_several_metrics_is_explained_once() -> None:
    page = made("docs/reference/metrics.md")
    assert page.count("- `short_prompt`:") == 1
    assert "\n- those of [pdproxy_alone_total](#pdproxy_alone_total)\n- `none`:" in page
    assert page.count("`node`:") == 1


def test_every_setting_is_there_with_its_text() -> None:
    page = made("docs/reference/settings.md")
    for path, text in texts().items():
        section, _, name = path.rpartition(".")
        assert not section or f"`{name}`" in page or f"## {path}" in page
        assert text, path


def test_texts_belong_to_the_fields_above_them() -> None:
    source = '''
    class Section:
        """A section.

        More of it.
        """
        first: int
        """One
        and more:
          a  item
        """
        bare: int
        last: int = 1
        """Two."""
        def method(self): """No field."""
    '''
    assert docstrings(source) == {
        "": ["A section.", "More of it."],
        "first": ["One", "and more:", "  a  item"],
        "last": ["Two."],
    }


@pytest.mark.parametrize(
    "name", ["pdproxy_requests_total", "pdproxy_node_up", "pdproxy_tokenize_agrees"]
)
def test_metrics_of_all_kinds_are_there(name: str) -> None:
    """Counts of events, gauges, and those of parts that not every proxy has."""
    assert f"| `{name}` |" in made("docs/reference/metrics.md")


def test_routes_keep_their_text_and_get_their_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    page = tmp_path / "routes.md"
    page.write_text(f"Before.\n\n{routes.BEGIN}\n| old | row |\n\n{routes.END}\nAfter.\n")
    monkeypatch.setattr(routes, "PAGE", page)
    text = routes.page()
    assert text.startswith(f"Before.\n\n{routes.BEGIN}\n`split`, for clients:\n\n| path |")
    assert text.endswith(f"\n\n{routes.END}\nAfter.\n")
    assert "old" not in text
    assert text.count("| `/") == len(TABLE)
    page.write_text("Before.\n")
    with pytest.raises(ValueError, match="lacks"):
        routes.page()


def test_text_is_shown_as_it_is() -> None:
    assert cell("a_b * [c] <d> | `e_f | g`\nh") == r"a\_b \* \[c\] &lt;d> \| `e_f \| g` h"
    assert metrics.page().count("\n| `pdproxy_") > 30
