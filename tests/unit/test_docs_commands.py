"""The documents' commands work when they are copied: the real parser takes them, and no flag or
variable is made up.
"""

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from pdproxy.cli.options import settings_from
from pdproxy.settings.conform import leaves
from pdproxy.settings.load import RESERVED, variable
from pdproxy.settings.schema import Settings
from tests.chaos.__main__ import parser_of_options
from tests.reference import command_line

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "cli.md"),
]
OPERATORS = {"&&", "||", ";", "|", "&", "\n"}
ASSIGNMENT = re.compile(r"[A-Z_]+=")
FLAG = re.compile(r"--[a-z][\w-]*")
OTHERS = {"--minutes", "--no-build-isolation", "--skip-schema-validation"}
"""Flags of other programs, which the pages name: `python -m tests.fuzz.run`, pip, Helm."""
VLLM = frozenset((ROOT / "tests" / "reference" / "vllm_names.txt").read_text().split("\n"))
PARSER, CHAOS = command_line.parser(), parser_of_options()
COMMANDS = command_line.commands(PARSER)
SETTINGS = {variable(path) for path, _ in leaves(Settings)}


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each code block."""
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block"):
            yield token.info.strip(), token.content


def inline(text: str) -> Iterator[str]:
    """Yield what is in backticks within paragraphs and tables."""
    for token in MarkdownIt().enable("table").parse(text):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def commands(shell: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell text, variables in front of it included."""
    words: list[str] = []
    for line in shell.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in [*lexer, "\n"]:
            if word in OPERATORS:
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def program(words: list[str]) -> list[str]:
    """Return a command from its program on: without variables, and what a container runs instead of
    `docker`.
    """
    while words and ASSIGNMENT.match(words[0]):
        words = words[1:]
    if words[:2] == ["docker", "run"] and "pdproxy" in words:
        words = words[words.index("pdproxy") :]
        words += ["serve"] if len(words) == 1 else []  # the image's own command
    return [Path(words[0]).name, *words[1:]] if words else []


@cache
def in_pages() -> list[tuple[str, list[str]]]:
    """Return the commands in all pages' shell blocks, with their page."""
    return [
        (str(page.relative_to(ROOT)), words)
        for page in PAGES
        for language, text in blocks(page.read_text())
        for words in (commands(text) if language == "sh" else ())
    ]


def all_commands(name: str) -> list[tuple[str, list[str]]]:
    """Return those of this program."""
    return [
        (page, words)
        for page, words in in_pages()
        if program(words)[: name.count(" ") + 1] == name.split()
    ]


OURS, ENGINES = all_commands("pdproxy"), all_commands("vllm serve")


@pytest.mark.parametrize(
    ("page", "words"), OURS, ids=[f"{page}: {shlex.join(words)}"[:150] for page, words in OURS]
)
def test_a_command_is_taken(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser takes it. If it has settings, they are valid, too, but for files that the reader
    makes.
    """
    monkeypatch.chdir(ROOT)
    try:
        arguments = PARSER.parse_args(program(words)[1:])
    except SystemExit as end:  # --help, --version, or wrong words
        code, arguments = end.code, None
    else:
        code = 0
    assert code == 0, (page, capsys.readouterr().err)
    if arguments is None or "stage_config" not in arguments:
        return
    files = (arguments.config, arguments.stage_config)
    if all(file is None or file.exists() for file in files):
        settings_from(arguments, need_engines=False)


def test_commands_of_chaos_are_taken() -> None:
    """Its page has some."""
    found = [program(words) for _, words in all_commands("python -m tests.chaos")]
    assert len(found) > 2
    for words in found:
        CHAOS.parse_args(words[3:])


@pytest.mark.parametrize(
    ("page", "words"),
    ENGINES,
    ids=[f"{page}: {shlex.join(words)}"[:150] for page, words in ENGINES],
)
def test_an_engine_command_names_only_what_vllm_has(page: str, words: list[str]) -> None:
    assert unknown(words) == [], page
    if "--kv-transfer-config" in words:
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert {"kv_connector", "kv_role"} <= config.keys()


def unknown(words: list[str]) -> list[str]:
    """Return the flags and the variables of vLLM in a command that vLLM does not have."""
    variables = [word.partition("=")[0] for word in words if word.startswith("VLLM_")]
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [name for name in variables + flags if name not in VLLM]


def test_commands_are_found() -> None:
    """The patterns still match what the pages contain: pages show many commands, and only in shell
    blocks.
    """
    assert len(OURS) > 20
    assert len(ENGINES) > 5
    for page in PAGES:
        for language, text in blocks(page.read_text()):
            if language not in ("sh", "text", "yaml"):
                assert not re.search(r"^(pdproxy|vllm|curl) ", text, re.MULTILINE), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_flags_and_variables_that_exist(page: Path) -> None:
    text = page.read_text()
    assert wrong_words(text) == []
    assert wrong_variables(text) == []


def wrong_words(text: str) -> list[str]:
    """Return code in a paragraph that names a command or a flag that neither pdproxy nor vLLM
    has.
    """
    every = (
        {flag for of in (CHAOS, *_all(PARSER)) for flag in command_line.options(of)} | VLLM | OTHERS
    )
    wrong = []
    for code in inline(text):
        words = code.split()
        known = every
        if words[0] == "pdproxy" and len(words) > 1 and FLAG.fullmatch(words[1]) is None:
            if words[1] not in COMMANDS:
                wrong.append(code)
                continue
            known = {flag for of in _all(COMMANDS[words[1]]) for flag in command_line.options(of)}
        wrong += [
            code
            for word in words
            if (flag := FLAG.match(word)) and flag[0] not in known and words[0] in (word, "pdproxy")
        ]
    return wrong


def wrong_variables(text: str) -> list[str]:
    """Return the variables of pdproxy and of vLLM that neither has. VLLM_VERSION is
    compose.yaml's.
    """
    text = text.replace("\\_", "_")
    ours = [name for name in re.findall(r"\bPDPROXY_[A-Z_]*[A-Z]\b", text) if name not in SETTINGS]
    vllms = [
        name
        for name in re.findall(r"\bVLLM_[A-Z_]*[A-Z]\b", text)
        if name not in VLLM | {"VLLM_VERSION"}
    ]
    return [name for name in ours if not RESERVED.fullmatch(name)] + vllms


def _all(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield of
    for child in command_line.commands(of).values():
        yield from _all(child)


def test_what_does_not_exist_is_found() -> None:
    assert wrong_words(
        "`--prefil` `--prefill` `pdproxy server` `pdproxy serve --strict` `pdproxy check "
        "--strict` `ls --x`"
    ) == [
        "--prefil",
        "pdproxy server",
        "pdproxy serve --strict",
    ]
    assert wrong_words("`--kv-transfer-config` `--kv-transfer`") == ["--kv-transfer"]
    text = "PDPROXY_LISTEN__PORT PDPROXY_LISTEN_PORT PDPROXY_CONFIG VLLM_HOST_IP VLLM_NIXL_HOST"
    assert wrong_variables(text) == ["PDPROXY_LISTEN_PORT", "VLLM_NIXL_HOST"]
    assert unknown(["VLLM_PORTS=1", "vllm", "serve", "--port", "1", "--ports=2"]) == [
        "VLLM_PORTS",
        "--ports",
    ]


def test_shell_text_is_split_into_commands() -> None:
    text = (
        "A=1 .venv/bin/pdproxy x \\\n  --y 'a b' & pdproxy z # c\nif true; docker run -p 1 "
        "pdproxy serve"
    )
    found = [program(words) for words in commands(text)]
    assert found == [
        ["pdproxy", "x", "--y", "a b"],
        ["pdproxy", "z"],
        ["if", "true"],
        ["pdproxy", "serve"],
    ]
