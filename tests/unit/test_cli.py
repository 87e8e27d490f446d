"""The command line: what is printed where, exit codes, and what `serve` is handed."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from pdproxy import __version__
from pdproxy.cli.main import main
from pdproxy.settings.schema import Settings

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

    def run(settings: Settings) -> int:
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


def test_serve_takes_engines_in_every_order(served: list[Settings]) -> None:
    """--prefill and --decode can be repeated and take several URLs."""
    line = "serve --prefill a:1 b:1 --decode c:1 --prefill http://d:1 --aggregated e:1 f:1 --decode g:1"
    main(line.split())
    roles: dict[str, list[str]] = {}
    for node in served[0].pool.nodes:
        roles.setdefault(node.role, []).append(node.url.removeprefix("http://")[0])
    assert roles == {"prefill": ["a", "b", "d"], "decode": ["c", "g"], "aggregated": ["e", "f"]}


def test_serve_passes_every_option_on(served: list[Settings], tmp_path: Path) -> None:
    """Each option sets its key, over the file's."""
    config = tmp_path / "x.yaml"
    config.write_text("listen: {port: 1, host: x}\nlimits: {attempts: 9}")
    options = ["--host", "0.0.0.0", "--port", "9000", "--connector", "nixl", "--max-inflight", "5"]
    options += ["--log-level", "debug", "--log-format", "json"]
    main(["serve", *PAIR, "--config", str(config), *options])
    (settings,) = served
    assert (settings.listen.host, settings.listen.port, settings.pool.connector) == ("0.0.0.0", 9000, "nixl")
    assert (settings.limits.max_inflight, settings.limits.attempts) == (5, 9)
    assert (settings.observe.log_level, settings.observe.log_format) == ("debug", "json")


def test_serve_reads_a_stage_configuration(
    served: list[Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--stage-config makes engines of stages, at the URLs of the flags; a mistake in it is one line and exit code 2."""
    stages = [
        {
            "is_prefill_only": True,
            "engine_args": {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role}},
        }
        for role in ("kv_producer", "kv_both")
    ]
    stages[1] = {"is_decode_only": True, "engine_input_source": [0], "engine_args": stages[1]["engine_args"]}
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump({"stage_args": stages}))
    assert main(["serve", *PAIR, "--stage-config", str(path)]) == 7
    assert [(n.role, n.facts.tensor_parallel_size) for n in served[0].pool.nodes] == [("prefill", 1), ("decode", 1)]
    path.write_text(yaml.safe_dump({"stage_args": stages[:1]}))
    assert main(["serve", *PAIR, "--stage-config", str(path)]) == 2
    says = capsys.readouterr().err
    assert says.count("\n") == 1
    assert f"stage_args[0]: no decode stage names it in engine_input_source (stage config {path})" in says


def test_serve_reads_the_environment(served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables reach the settings, under the flags."""
    monkeypatch.setenv("PDPROXY_LISTEN__PORT", "9001")
    monkeypatch.setenv("PDPROXY_LISTEN__HOST", "env")
    main(["serve", *PAIR, "--host", "flag"])
    assert (served[0].listen.host, served[0].listen.port) == ("flag", 9001)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("serve", "pools[0].nodes: no engine is configured: give --prefill and --decode, or nodes in the YAML file"),
        (
            "serve --prefill a:1",
            "pools[0].nodes: prefill engines, but no decode engine that could take what they compute",
        ),
        ("serve --decode a:1 --port x", 'listen.port: expected a whole number >= 1 and <= 65535, got "x" (--port)'),
        ("serve --decode a:1 --port -1", 'listen.port: expected a whole number >= 1 and <= 65535, got "-1" (--port)'),
        (
            "serve --decode a:1 --connector x",
            'pools[0].connector: expected nixl or lmcache-pd or lmcache-mp or shared or kvstore-keys, got "x" (--connector)',
        ),
        (
            "config print --log-level loud",
            'observe.log_level: expected debug or info or warning or error, got "loud" (--log-level)',
        ),
        (
            "check --decode a:1 --connector shared",
            "pools[0].connector: `check` knows nixl alone, got shared: use `pdproxy conformance`",
        ),
        ("config validate --config no/such", "no/such: can't be read: No such file or directory"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(
    line: str, error: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, nothing on stdout, nothing started."""
    assert main(line.split()) == 2
    assert capsys.readouterr() == ("", f"pdproxy: {error}\n")
    assert served == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("config", "the following arguments are required: ACTION"),
        ("serve --decode", "argument --decode: expected at least one argument"),
        ("serve --dec a:1", "unrecognized arguments: --dec a:1"),
        ("config print --pre a:1", "unrecognized arguments: --pre a:1"),
        ("bogus", "invalid choice: 'bogus'"),
    ],
)
def test_wrong_arguments_are_two_lines_and_exit_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of usage and the message; abbreviated options are wrong arguments."""
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    usage, text = err.splitlines()
    assert out == ""
    assert usage.startswith("usage: pdproxy")
    assert message in text


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--version and --help print to stdout and succeed."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdproxy {__version__}\n"
    for line in ("--help", "serve --help", "config --help", "config print --help", "config validate --help"):
        assert main(line.split()) == 0
        assert capsys.readouterr().out.startswith("usage: pdproxy")


def test_config_print_shows_what_is_in_force(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Everything, from all sources, as YAML that can be used as a file; engines aren't needed."""
    assert main(["config", "print"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["deadlines"]["connect"] == 2.0
    assert main(["config", "print", *PAIR, "--port", "9000"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "x.yaml").write_text(text)
    assert main(["config", "print", "--config", str(tmp_path / "x.yaml")]) == 0
    assert capsys.readouterr().out == text


def test_config_print_masks_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout.startswith("listen:\n")


def test_the_module_of_the_entry_point_can_be_run() -> None:
    """`python -m pdproxy.cli.main` is the command too."""
    command = [sys.executable, "-m", "pdproxy.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"pdproxy {__version__}\n", "")
