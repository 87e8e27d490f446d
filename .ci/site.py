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
OUTSIDE = re.compile(r"(\]\()((?:\.\./)+[^)#]+)(?:#[^)]*)?(\))")
"""Links that may lead out of the folder of the documents."""


class NarrowLists(Extension):
    """mdformat indents what belongs to an item of a list by two or three spaces, not by four."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - Markdown's name
        """Build the parser anew: its parts keep the width that they were made with."""
        md.tab_length = 2
        md.build_parser()


def on_config(config: MkDocsConfig) -> None:
    """Indent as mdformat does. The first extension: those that follow add to the parser."""
    config.markdown_extensions.insert(0, NarrowLists())


def outside(page: str, link: str) -> str | None:
    """Return the file of the repository that a page's relative link names, by its path from the
    root; None if it is one of the documents.
    """
    path = os.path.normpath(PurePosixPath("docs", page).parent / link)
    return path if not path.startswith("docs/") and (ROOT / path).is_file() else None


def at(path: str) -> str:
    """Return where the site has a file from outside the documents. Pages of Markdown are text
    there: their links are relative to another folder.
    """
    return f"repository/{path}.txt" if path.endswith(".md") else f"repository/{path}"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files of the repository to which pages link."""
    wanted = {
        path
        for page in files.documentation_pages()
        for _, link, _ in OUTSIDE.findall(page.content_string)
        if (path := outside(page.src_uri, link))
    }
    for path in sorted(wanted):
        files.append(File.generated(config, at(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to these files where the site has them. What is not in the navigation, is not
    found by the search either.
    """
    if page.file.inclusion.is_not_in_nav():
        page.meta["search"] = {"exclude": True}

    def moved(match: re.Match[str]) -> str:
        path = outside(page.file.src_uri, match[2])
        if path is None:
            return match[0]
        here = PurePosixPath(page.file.src_uri).parent
        return f"{match[1]}{os.path.relpath(at(path), here)}{match[3]}"

    return OUTSIDE.sub(moved, markdown)
