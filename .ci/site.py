"""What the site of the documents (mkdocs.yml) needs beside the pages, so that the same pages work
in the repository.
"""

import os
import re
from pathlib import Path, PurePosixPath

from markdown import Extension, Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
START = "start.md"
"""The page of the site that is the repository's README.md."""
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)(#[^)]*)?(?=\))")


class NarrowLists(Extension):
    """mdformat indents what belongs to an item of a list by two or three spaces, not by four."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - Markdown's name
        """Build the parser anew: its parts keep the width that they were made with."""
        md.tab_length = 2
        md.build_parser()


def on_config(config: MkDocsConfig) -> None:
    """Indent as mdformat does. The first extension: those that follow add to the parser."""
    config.markdown_extensions.insert(0, NarrowLists())


def linked(page: str, link: str) -> str:
    """Return what a page's relative link names in the repository, by its path from the root."""
    folder = PurePosixPath() if page == START else PurePosixPath("docs", page).parent
    return os.path.normpath(folder / link)


def at(path: str) -> str | None:
    """Return where the site has a file of the repository; None if it has none. Pages of Markdown
    from outside the documents are text there: their links are relative to another folder.
    """
    if path == "README.md":
        return START
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not (ROOT / path).is_file():
        return None
    return f"repository/{path}.txt" if path.endswith(".md") else f"repository/{path}"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add README.md, and the files outside the documents to which pages link."""
    files.append(File.generated(config, START, abs_src_path=str(ROOT / "README.md")))
    wanted = {
        linked(page.src_uri, link)
        for page in files.documentation_pages()
        for _, link, _ in LINK.findall(page.content_string)
    }
    for path in sorted(wanted):
        if (name := at(path)) and name.startswith("repository/"):
            files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to where the site has these files. What is not in the navigation, is not
    found by the search either.
    """
    if page.file.inclusion.is_not_in_nav():
        page.meta["search"] = {"exclude": True}
    here = PurePosixPath(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        to = at(linked(str(here), match[2]))
        if to is None:
            return match[0]
        anchor = match[3] if match[3] and to.endswith(".md") else ""
        return f"{match[1]}{os.path.relpath(to, here.parent)}{anchor}"

    return LINK.sub(moved, markdown)
