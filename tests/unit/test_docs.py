"""The documents name only modules, settings and files that exist, their relative links work, and
they are wrapped.
"""

import pkgutil
import re
from pathlib import Path

import pytest
import yaml

from tests.reference.markdown import wrapped

ROOT = Path(__file__).parents[2]
PROXY = ROOT / "proxy" / "pdproxy"
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*.md")),
    *(ROOT / name for name in ("benchmarks/README.md", "tests/engines/README.md")),
]
PACKAGES = {path.parent.name for path in PROXY.glob("*/__init__.py")} | {
    "pdproxy",
    "pdproxy_lab",
    "pdproxy_operator",
}
FOLDERS = {".ci", "benchmarks", "configs", "docs", "tests"} | PACKAGES
CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"\w+(\.\w+)+")
FILE = re.compile(r"[\w.*-]+\.(py|json|yaml|md|lock)")
LINK = re.compile(r"\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

MERGE = re.compile(r"<\\?<\\?<\\?<|(?<![=|-])={7}(?!=)|^(> ?){7}|^> > > >", re.MULTILINE)


def setting_names() -> set[str]:
    """Return the dotted names of all settings of the top-level sections, such as
    `limits.attempts`.
    """

    def walk(tree: dict[str, object], path: str) -> set[str]:
        found = set()
        for key, value in tree.items():
            found.add(f"{path}{key}")
            if isinstance(value, dict):
                found |= walk(value, f"{path}{key}.")
        return found

    return walk(yaml.safe_load((ROOT / "configs" / "reference.yaml").read_text()), "")


SETTINGS = setting_names()
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module of a package, or an attribute of one. Those of the
    proxy need no `pdproxy`.
    """
    try:
        pkgutil.resolve_name(
            name
            if name.startswith(("pdproxy.", "pdproxy_lab.", "pdproxy_operator."))
            else f"pdproxy.{name}"
        )
    except (ImportError, AttributeError):
        return False
    return True


def names_in(text: str) -> set[str]:
    """Return the dotted names in backticks that begin like a module of the package or like a
    setting.
    """
    dotted = (DOTTED.match(code) for code in CODE.findall(text))
    names = {match[0] for match in dotted if match}
    return {
        name
        for name in names
        if name.partition(".")[0] in PACKAGES | SECTIONS
        and not FILE.fullmatch(name)
        and name != "pdproxy.dev"  # labels of pods
    }


def files_in(text: str) -> set[str]:
    """Return the paths in backticks that begin with a folder of the project, and the bare names of
    files.
    """
    words = {code.split()[0] for code in CODE.findall(text) if code.split()}
    return {
        word
        for word in words
        if (word.partition("/")[0] in FOLDERS and "/" in word) or FILE.fullmatch(word)
    }


def missing_names(text: str) -> list[str]:
    return sorted(name for name in names_in(text) if name not in SETTINGS and not resolves(name))


def missing_files(text: str, folder: Path) -> list[str]:
    """Return the files that are neither under the root, nor in one of the packages, nor beside the
    page.
    """
    folders = (ROOT, ROOT / "proxy", PROXY, folder)
    return sorted(name for name in files_in(text) if not any(any(at.glob(name)) for at in folders))


def anchors(text: str) -> set[str]:
    """Return the names by which links reach a page's headings: as GitHub and PyPI make them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(text)
    }


def missing_links(text: str, folder: Path) -> list[str]:
    """Return the relative links to a file that does not exist, or to a heading that its page does
    not have.
    """
    missing = []
    for name, anchor in LINK.findall(text):
        to = folder / name
        if not to.exists() or (anchor and anchor not in anchors(to.read_text() if name else text)):
            missing.append(f"{name}#{anchor}" if anchor else name)
    return sorted(missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_exists(page: Path) -> None:
    text = page.read_text()
    assert missing_names(text) == []
    assert missing_files(text, page.parent) == []
    assert missing_links(text, page.parent) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_marks_of_a_merge(page: Path) -> None:
    """Neither as git writes them, nor as the formatter has wrapped them."""
    assert not MERGE.search(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_wrapped(page: Path) -> None:
    """`mdformat README.md docs` (and so on) changes nothing: paragraphs end at 100 columns, tables
    and code are left alone.
    """
    text = page.read_text()
    assert text == wrapped(text)


def test_what_is_not_wrapped_is_found() -> None:
    text = f"{'word ' * 19}word\n"
    assert wrapped(text) == text
    assert len(text) == 100
    assert wrapped(f"word {text}") == f"{text}word\n"
    code = f"```\n{text * 2}```\n"
    assert wrapped(code) == code


def test_the_pages_name_modules_settings_and_files() -> None:
    """The patterns still match what the pages contain."""
    text = "".join(page.read_text() for page in PAGES)
    names = names_in(text)
    assert len(names & SETTINGS) > 30
    assert len(names - SETTINGS) > 30
    assert len(files_in(text)) > 20
    assert len(LINK.findall(text)) > 15


def test_what_does_not_exist_is_found() -> None:
    text = (
        "`kit.nothing` `kit.text` `web.app.nothing` `limits.nothing` `limits.attempts: 3` "
        "`os.nothing`"
    )
    assert missing_names(text) == ["kit.nothing", "limits.nothing", "web.app.nothing"]
    text = "`nothing.py` `tests/nothing` `tests/unit/test_docs.py` `kit/*.py` `no/folder`"
    assert missing_files(text, ROOT) == ["nothing.py", "tests/nothing"]
    assert missing_links("[a](docs/nothing.md) [b](README.md#test) [c](https://x.y/z)", ROOT) == [
        "docs/nothing.md"
    ]
    assert missing_links("## One, two\n[a](#one-two) [b](#two) [c](README.md#nothing)", ROOT) == [
        "#two",
        "README.md#nothing",
    ]
