"""The command line: what is printed where, exit codes, and what `serve` is handed."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from pdproxy import __version__
from pdproxy.cli.commands import COMMANDS, parser_of
from pdproxy.cli.main import main
from pdproxy.settings.load import load
from pdproxy.settings.schema import Settings
from pdproxy.transfer import registry

PAIR = ["--prefill", "127.0.0.1:8200", "--decode", "127.0.0.1:8300"]


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that the tests run in says nothing to the proxy."""
    for name in [name for name in os.environ if name.startswith("PDPROXY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Replaces the server: collects the settings it was started with, exits with 7."""
    started: list[Settings] = []

    def run(settings: Settings, source: object) -> int:
        started.append(settings)
        return 7

    server = types.ModuleType("pdproxy.app.server")
    server.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pdproxy.app.server", server)
    return started


def test_serve_hands_over_settings_and_exit_code(served: list[Settings]) -> None:
    """`serve` reads the settings once and returns what the server returns."""
    assert main(["serve", *PAIR]) == 7
    (settings,) = served
    assert [(n.role, n.url) for n in settings.pool.nodes] == [
        ("prefill", "http://127.0.0.1:8200"),
        ("decode", "http://127.0.0.1:8300"),
    ]


def test_a_missing_module_is_one_line_with_its_name(
    served: list[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where it is pdproxy's own: that is a defect."""

    missing = iter(("zmq.asyncio", "pdproxy.app.none", None))

    def run(_settings: Settings, _source: object) -> int:
        raise ModuleNotFoundError("a text", name=next(missing))

    monkeypatch.setattr(sys.modules["pdproxy.app.server"], "run", run)
    assert main(["serve", *PAIR]) == 2
    assert capsys.readouterr().err == (
        "pdproxy: the Python module zmq.asyncio is not installed, and pdproxy needs it: install "
        "pdproxy with its dependencies\n"
    )
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            main(["serve", *PAIR])


def test_serve_takes_engines_in_every_order(served: list[Settings]) -> None:
    """--prefill and --decode can be repeated and take several URLs."""
    line = (
        "serve --prefill a:1 b:1 --decode c:1 --prefill http://d:1 --aggregated e:1 f:1 --decode "
        "g:1"
    )
    main(line.split())
    roles: dict[str, list[str]] = {}
    for engine in served[0].pool.nodes:
        roles.setdefault(engine.role, []).append(engine.url.removeprefix("http://")[0])
    assert roles == {"prefill": ["a", "b", "d"], "decode": ["c", "g"], "aggregated": ["e", "f"]}


def test_serve_passes_every_option_on(served: list[Settings], tmp_path: Path) -> None:
    """Each option sets its key, over the file's."""
    config = tmp_path / "x.yaml"
    config.write_text("listen: {port: 1, host: x}\nlimits: {attempts: 9}")
    options = ["--host", "0.0.0.0", "--port", "9000", "--connector", "nixl", "--max-inflight", "5"]
    options += ["--log-level", "debug", "--log-format", "json"]
    main(["serve", *PAIR, "--config", str(config), *options])
    (settings,) = served
    assert (settings.listen.host, settings.listen.port, settings.pool.connector) == (
        "0.0.0.0",
        9000,
        "nixl",
    )
    assert (settings.limits.max_inflight, settings.limits.attempts) == (5, 9)
    assert (settings.observe.log_level, settings.observe.log_format) == ("debug", "json")


def test_serve_reads_a_stage_configuration(
    served: list[Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--stage-config makes engines of stages, at the URLs of the flags; a mistake in it is one line
    and exit code 2.
    """
    stages = [
        {
            "is_prefill_only": True,
            "engine_args": {
                "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role}
            },
        }
        for role in ("kv_producer", "kv_both")
    ]
    stages[1] = {
        "is_decode_only": True,
        "engine_input_source": [0],
        "engine_args": stages[1]["engine_args"],
    }
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump({"stage_args": stages}))
    assert main(["serve", *PAIR, "--stage-config", str(path)]) == 7
    assert [(n.role, n.facts.tensor_parallel_size) for n in served[0].pool.nodes] == [
        ("prefill", 1),
        ("decode", 1),
    ]
    path.write_text(yaml.safe_dump({"stage_args": stages[:1]}))
    assert main(["serve", *PAIR, "--stage-config", str(path)]) == 2
    says = capsys.readouterr().err
    assert says.count("\n") == 1
    assert (
        f"stage_args[0]: no decode stage names it in engine_input_source (stage config {path})"
        in says
    )


def test_serve_reads_the_environment(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables reach the settings, under the flags."""
    monkeypatch.setenv("PDPROXY_LISTEN__PORT", "9001")
    monkeypatch.setenv("PDPROXY_LISTEN__HOST", "env")
    main(["serve", *PAIR, "--host", "flag"])
    assert (served[0].listen.host, served[0].listen.port) == ("flag", 9001)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            "serve",
            (
                "pools[0].nodes: no engine is configured: give --prefill and --decode, or nodes in "
                "the YAML file"
            ),
        ),
        (
            "serve --prefill a:1",
            (
                "pools[0].nodes: prefill engines, but no decode engine that could take what they "
                "compute"
            ),
        ),
        (
            "serve --decode a:1 --port x",
            'listen.port: expected a whole number >= 1 and <= 65535, got "x" (--port)',
        ),
        (
            "serve --decode a:1 --port -1",
            'listen.port: expected a whole number >= 1 and <= 65535, got "-1" (--port)',
        ),
        (
            "serve --decode a:1 --connector x",
            (
                f'pools[0].connector: expected {" or ".join(registry.choices())}, got "x" '
                f"(--connector)"
            ),
        ),
        (
            "config print --log-level loud",
            (
                'observe.log_level: expected debug or info or warning or error, got "loud" '
                "(--log-level)"
            ),
        ),
        (
            "check --decode a:1 --connector shared",
            (
                "pools[0].connector: this check is for nixl only, got shared: run `pdproxy "
                "conformance`, which tests all connectors"
            ),
        ),
        ("config validate --config no/such", "no/such: can't be read: No such file or directory"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(
    line: str, error: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, nothing on stdout, nothing started."""
    assert main(line.split()) == 2
    command = " ".join(takewhile(str.isalpha, line.split()))
    assert capsys.readouterr() == ("", f"pdproxy {command}: {error}\n")
    assert served == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config", "pdproxy config: ACTION is missing: expected init, print, validate, schema"),
        ("serve --decode", "pdproxy serve: --decode: expected at least one argument"),
        ("serve --prefil a:1", "pdproxy serve: unknown option --prefil: did you mean --prefill?"),
        ("serve --prefil=a:1", "pdproxy serve: unknown option --prefil: did you mean --prefill?"),
        ("serve --dec a:1", "pdproxy serve: unknown option --dec: did you mean --decode?"),
        ("serve --decode a:1 --xyzzy 1", "pdproxy serve: unknown option --xyzzy"),
        (
            "check --api-key x",
            "pdproxy check: unknown option --api-key: did you mean --api-keys-file?",
        ),
        (
            "config print --pre a:1",
            "pdproxy config print: unknown option --pre: did you mean --prefill?",
        ),
        ("config prnt", "pdproxy config: unknown action prnt: did you mean print?"),
        ("sim x", "pdproxy sim: unexpected argument x"),
        ("srve --port 1", "pdproxy: unknown command srve: did you mean serve?"),
        ("xyzzy", f"pdproxy: unknown command xyzzy: expected {', '.join(COMMANDS)}"),
        ("--verison", "pdproxy: unknown option --verison: did you mean --version?"),
        (
            "demo --engine simm",
            "pdproxy demo: --engine: expected sim or vllm, got simm: did you mean sim?",
        ),
        ("completion fish", "pdproxy completion: unknown shell fish: expected bash, zsh, tcsh"),
        ("check --timeout x", "pdproxy check: --timeout: expected 0.1 to 600 seconds, got 'x'"),
    ],
)
def test_a_wrong_argument_is_one_line_of_its_command_and_exit_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that met it, what was probably meant, and where help is; abbreviated options are
    wrong arguments.
    """
    command = line.split() if line != "--verison" else [line, "serve"]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{message}\nSee `{message.partition(':')[0]} --help`.\n"


def test_every_wrong_argument_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Several unknown options are several lines; what is long or could control a terminal is shown
    shortened and escaped.
    """
    assert (
        main(["serve", "--prot", "1", "--hots=x", "--prot", "2", "--\x1b[31m", f"--{'x' * 500}"])
        == 2
    )
    assert capsys.readouterr().err.splitlines() == [
        "pdproxy serve: unknown option --prot: did you mean --port?",
        "pdproxy serve: unknown option --hots: did you mean --host?",
        "pdproxy serve: unknown option '--\\x1b[31m'",
        f"pdproxy serve: unknown option --{'x' * 75}...",
        "See `pdproxy serve --help`.",
    ]


def test_all_mistakes_of_settings_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each, with the command in front, and exit code 2."""
    path = tmp_path / "x.yaml"
    path.write_text("listen: {port: x}\nlogs: 1\nlimits: {attempts: 0}")
    monkeypatch.setenv("PDPROXY_LISTEN__HOTS", "x")
    assert main(["serve", "--config", str(path), "--log-level", "loud"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        (
            f'pdproxy serve: listen.port: expected a whole number >= 1 and <= 65535, got "x" (file '
            f"{path})"
        ),
        f"pdproxy serve: logs: unknown key (file {path})",
        (
            f"pdproxy serve: limits.attempts: expected a whole number >= 1 and <= 100, got 0 (file "
            f"{path})"
        ),
        (
            "pdproxy serve: PDPROXY_LISTEN__HOTS: unknown environment variable (did you mean "
            "PDPROXY_LISTEN__HOST?)"
        ),
        (
            "pdproxy serve: observe.log_level: expected debug or info or warning or error, got "
            '"loud" (--log-level)'
        ),
    ]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--version and --help print to stdout and succeed."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdproxy {__version__}\n"
    for line in (
        "",
        *COMMANDS,
        "config init",
        "config print",
        "config validate",
        "engines list",
        "engines drain",
    ):
        assert main([*line.split(), "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("usage: pdproxy")
        assert "\nexamples:\n  pdproxy " in out or line in ("config", "engines")


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """The options of a parser and its subcommands, each with its help."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for one in action.choices.values():
                yield from options_of(one)
        elif action.option_strings and action.help is not argparse.SUPPRESS:
            yield f"{parser.prog} {action.option_strings[-1]}", action.help or ""


def test_each_help_of_an_option_stands_alone() -> None:
    """It states the default (switches and lists of engines have none), and does not begin with a
    word for another line.
    """
    of_all = (
        "--help",
        "--version",
        "--json",
        "--strict",
        "--quiet",
        "--ready",
        "--fault",
        "--encode",
        "--prefill",
        "--decode",
    )
    switches = (*of_all, "--spread", "--detailed", "--allow-lag", "--busy", "--security")
    found = dict(options_of(parser_of(COMMANDS)))
    assert len(found) > 200
    bare = [
        option
        for option, words in found.items()
        if not ("(default" in words or "(required)" in words)
        and not option.endswith((*switches, "--aggregated", "--any", "--by-label"))
    ]
    assert bare == []
    assert [
        option for option, words in found.items() if words.startswith(("its ", "the same"))
    ] == ["pdproxy health --key"]


def test_the_options_that_are_settings_are_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command that takes settings has them in the same groups by purpose, none in the group of
    others.
    """
    groups = [
        "settings file",
        "engines",
        "listening and TLS",
        "keys",
        "browsers (CORS)",
        "KV transfer",
        "receivers of KV",
    ]
    groups += ["tokenizing", "choosing engines", "limits", "logs"]
    for line in ("serve", "check", "conformance", "health", "config print", "config validate"):
        assert main([*line.split(), "--help"]) == 0
        titles = re.findall(r"^(\w[^\n]*):$", capsys.readouterr().out, flags=re.MULTILINE)
        assert [title for title in titles if title in groups] == groups
        assert set(titles) - set(groups) <= {"options", "examples", line}


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error with the code of wrong arguments: a script that lacks its command fails."""
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: pdproxy")
    assert all(f"\n    {name}" in err for name in COMMANDS)


def test_config_init_prints_and_writes_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The starter changes no default, and neither do its comments name what is no setting; --all
    gives the file of configs/. A file that exists is kept unless --force is given.
    """
    reference = (Path(__file__).parents[2] / "configs" / "reference.yaml").read_text()
    assert main(["config", "init", "--all"]) == 0
    assert capsys.readouterr() == (reference, "")
    path = tmp_path / "x.yaml"
    assert main(["config", "init", "--all", "--out", str(path)]) == 0
    assert capsys.readouterr() == (f"wrote {path}\n", "")
    assert path.read_text() == reference
    whole = load(path, {}, [], [])
    assert main(["config", "init", "--out", str(path), "--force"]) == 0
    starter = path.read_text()
    assert len(starter.splitlines()) <= 32
    assert load(path, {}, [], []) == whole
    assert main(["config", "validate", "--config", str(path)]) == 0
    commented = re.sub(r"(?m)^  # (\w+: \S+)$", r"  \1", starter)
    assert commented.count("\n  admin: ") == commented.count("\n  api_keys_file: ") == 1
    path.write_text(commented)
    assert load(path, {}, [], []).auth.engine_api_key_file == "engine-key.txt"
    reference = starter
    capsys.readouterr()
    path.write_text("mine")
    assert main(["config", "init", "--out", str(path)]) == 1
    assert capsys.readouterr() == (
        "",
        f"pdproxy config init: {path}: exists already: --force overwrites it\n",
    )
    assert path.read_text() == "mine"
    assert main(["config", "init", "--out", str(path), "--force"]) == 0
    assert path.read_text() == reference
    capsys.readouterr()
    assert main(["config", "init", "--out", str(tmp_path / "no" / "x.yaml")]) == 1
    assert capsys.readouterr().err.endswith("x.yaml: can't be written: No such file or directory\n")
    assert main(["config", "init", "--out", "a\0b"]) == 1
    assert (
        capsys.readouterr().err
        == 'pdproxy config init: "a\\u0000b": can\'t be written: is no name of a file\n'
    )
    assert main(["config", "init", "--force"]) == 2


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["ser"], "serve"),
        (["serve", "--pref"], "--prefill"),
        (["config", "i"], "init"),
        (["engines", "dr"], "drain"),
        (["engines", "list", "--wat"], "--watch"),
        (["completion", "z"], "zsh"),
        (["serve", "--config", "pyproj"], "pyproject.toml"),
    ],
)
def test_bash_completes_commands_options_and_files(
    words: list[str], wanted: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script runs in bash and knows what the parser knows."""
    assert main(["completion", "bash"]) == 0
    script = capfd.readouterr().out
    line = shlex.join(["pdproxy", *words])
    script += (
        f'\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_pdproxy; printf "%s\\n" '
        f'"${{COMPREPLY[@]}}"'
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=root
    )
    assert (done.stdout.split(), done.stderr) == ([wanted], "")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_scripts_for_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They name the commands; these shells need not be on this machine."""
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("line", "imported"),
    [("--version", []), ("--help", []), ("serve --help", ["pdproxy.cli.serve", "yaml"])],
)
def test_a_command_is_imported_alone(line: str, imported: list[str]) -> None:
    """No other command, no tool, and none of the libraries of other commands."""
    code = (
        "import sys; from pdproxy.cli.main import main; from pdproxy.cli.commands import COMMANDS\n"
        f"main({line.split()})\n"
        "watched = {'shtab', 'yaml', 'asyncio', *(one.module for one in COMMANDS.values())}\n"
        "print(sorted(x for x in sys.modules if x in watched or x.startswith('pdproxy_lab')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.splitlines()[-1], done.stderr) == (str(imported), "")


def test_config_print_shows_what_is_in_force(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Everything, from all sources, as YAML that can be used as a file; engines aren't needed."""
    assert main(["config", "print"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["deadlines"]["connect"] == 2.0
    assert main(["config", "print", *PAIR, "--port", "9000"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "x.yaml").write_text(text)
    assert main(["config", "print", "--config", str(tmp_path / "x.yaml")]) == 0
    assert capsys.readouterr().out == text


def test_config_print_masks_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No key is ever printed."""
    monkeypatch.setenv("PDPROXY_AUTH__API_KEYS", "s3cret,t0p")
    monkeypatch.setenv("PDPROXY_AUTH__ENGINE_API_KEY", "hunter2")
    assert main(["config", "print"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    auth = yaml.safe_load(out)["auth"]
    assert auth["api_keys"] == ["********"] * 2
    assert auth["engine_api_key"] == "********"


def test_config_validate(capsys: pytest.CaptureFixture[str]) -> None:
    """It says ok and what it saw, or exits with 2 like `serve` would."""
    assert main(["config", "validate", *PAIR, "--decode", "b:1"]) == 0
    assert capsys.readouterr().out == "ok: 1 prefill, 2 decode\n"
    assert main(["config", "validate"]) == 2


def test_wrong_settings_are_told_without_loading_the_server() -> None:
    """`python -m pdproxy` works, and `config` imports none of the server's libraries."""
    heavy = "fastapi,uvicorn,aiohttp,pdproxy.app,pdproxy.web"
    code = (
        "import sys, runpy; sys.argv = ['pdproxy', 'config', 'print']\n"
        "try: runpy.run_module('pdproxy', run_name='__main__')\n"
        f"finally: print([m for m in '{heavy}'.split(',') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout.startswith("listen:\n")


def test_the_module_of_the_entry_point_can_be_run() -> None:
    """`python -m pdproxy.cli.main` is the command too."""
    command = [sys.executable, "-m", "pdproxy.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"pdproxy {__version__}\n", "")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    ("target", "code", "error"),
    [
        ("/dev/full", 1, "pdproxy: standard output can't be written: No space left on device\n"),
        ("a pipe that nobody reads", 1, ""),
        ("closed", 0, ""),
    ],
)
@pytest.mark.parametrize("command", ["--version", "config print", "config init", "completion bash"])
def test_an_output_that_cannot_be_written_is_one_line(
    command: str, target: str, code: int, error: str, unbuffered: str
) -> None:
    """No traceback; a reader that has left is no news, and nobody wants what goes to a closed
    output.
    """
    run = f"{sys.executable} -m pdproxy {command}"
    script = {"/dev/full": f"{run} >/dev/full", "closed": f"{run} >&-"}.get(target, f"exec {run}")
    reading, writing = os.pipe()
    os.close(reading)
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        ["sh", "-c", script],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, error)
