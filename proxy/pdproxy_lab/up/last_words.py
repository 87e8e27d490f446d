"""What the end of an engine's log says about why the engine has ended. Pure, but for `last_words`.

The last lines seldom say it: vLLM's processes end one after the other, and the last one only says
that another one has failed ("See root cause above"). So what is looked for is the last exception
that is no consequence of another one, in the tracebacks of all processes. The words are those of
vLLM 0.26 to 0.33; of words that change, the last lines are shown.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL = 1 << 18
"""Bytes of a log's end that are looked through."""
_LINES, _WIDTH, _SENTENCE = 15, 500, 700
_NOISE = ('"GET /', '"POST /')
"""Scrapes, probes and requests, which fill a log."""
_LINE = re.compile(
    r"(?:\((?P<source>[^()]{1,60} pid=\d+)\) )?"
    r"(?:(?P<level>[A-Z]+) [\d-]+ [\d:]+ \[[^\]]+\] ?)?(?P<text>.*)"
)
"""A line of vLLM's log: its process, its level, its text. Tracebacks that Python prints have no
process and no level.
"""
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*[a-z]\w*(?:: .*)?")
_BEGIN, _IGNORED = "Traceback (most recent call last):", "Exception ignored in"
_FOLLOWS = (
    *("root cause", "EngineDeadError", "CancelledError", "KeyboardInterrupt", "SystemExit"),
    *("BrokenPipeError", "Connection closed by peer", "Connection reset by peer"),
)
"""Words of exceptions that only say that another process or task has ended."""
_CHECKED = re.compile(r"\d+ validation errors? for ")
"""The first line of an error of pydantic; the next one says what is wrong."""
_USAGE = re.compile(r"[\w. ]+: error: .+")


def last_words(text: str, log: Path) -> str:
    """Return a text about a process that has ended, and why it has, as far as its log says it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            tail = file.read(TAIL).decode("utf-8", "replace")
    except OSError:
        tail = ""
    if (cause := root_cause(tail)) is not None:
        return f"{text}: {cause}\nIts log: {log}"
    if lines := last_lines(tail):
        return "\n".join([f"{text}; its log, {log}, ends with:", *lines])
    return f"{text}; its log, {log}, is empty"


def last_lines(text: str) -> list[str]:
    """Return the last lines of a log that are none of scrapes and probes."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return [line[:_WIDTH] for line in lines if not any(one in line for one in _NOISE)][-_LINES:]


def root_cause(log: str) -> str | None:
    """Return the exception that ended an engine, in one line; None if its log shows none."""
    found: list[str] = []
    usage = None
    inside: set[str] = set()  # the processes whose traceback is being read
    before: dict[str, str] = {}  # the last line of each process
    for line in log.splitlines():
        matched = _LINE.fullmatch(line)
        if matched is None or matched["level"] not in (None, "ERROR"):
            continue
        source, text = matched["source"] or "", matched["text"]
        last = before.get(source, "")
        before[source] = text
        if text == _BEGIN and not last.startswith(_IGNORED):
            inside.add(source)
        elif source in inside and not text.startswith(" ") and _EXCEPTION.fullmatch(text):
            inside.discard(source)
            found.append(text)
        elif found and last == found[-1] and _CHECKED.search(last):
            found[-1] += f" {text.strip().partition(' [type=')[0]}"
        elif _USAGE.fullmatch(text):
            usage = text
    causes = [one for one in found if not any(word in one for word in _FOLLOWS)]
    cause = causes[-1] if causes else usage
    return None if cause is None else cause[:_SENTENCE]
