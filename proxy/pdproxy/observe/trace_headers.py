"""The file of header lines that the collector of traces gets, such as its key: `name: value` each;
blank lines and those that begin with `#` are skipped.

No error quotes a line: a value may be a key.
"""

from __future__ import annotations

import re

from pdproxy.kit.regular_file import read_regular

MAX_BYTES = 65_536
_LINE = re.compile(r"([!#-'*+.^_`|~0-9A-Za-z-]{1,100})[ \t]*:[ \t]*([\x21-\x7e][\x20-\x7e]*)")


def read_headers(path: str) -> tuple[tuple[str, str], ...]:
    """Return the names, in lower case, and values.

    Raises:
        UnusableFileError: it can't be read.
        ValueError: a line is no header.
    """
    found = []
    text = read_regular(path, MAX_BYTES).decode("utf-8", "replace")
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if (header := _LINE.fullmatch(stripped)) is None:
            raise ValueError(f"line {number} is no header: expected name: value")
        found.append((header[1].lower(), header[2]))
    return tuple(found)
