"""The recipe of docs/internals/contributing.md for a setting: a field with its docstring is all
that is declared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pdproxy

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pdproxy.__file__).parent
FIELDS = '''
    max_bananas: Annotated[
        AtOnce[Count], Option("fruit that is held at once", "N", "--max-bananas")
    ] = 7
    """Fruit that is held at once.
      ripe    what can be eaten
    """

    bunch: Switch[Annotated[int, Meta(ge=0, le=9)]] = 1
    """How much fruit comes together. 0: none."""

    stalk: Seconds = 3.0
    """How long it hangs."""

    monkeys: tuple[Key, ...] = ()
    """Who may have it."""
'''
OF_POOLS = '''
    ripeness: Annotated[int, Option("how ripe its fruit is", "N", "--ripeness")] = 1
    """How ripe this pool's fruit is."""
'''
SCRIPT = """
import asyncio, contextlib, io, os, sys
from pathlib import Path
from msgspec.structs import replace
from pdproxy.app.compose import Proxy
from pdproxy.app.live import LiveSettings
from pdproxy.cli.main import main
from pdproxy.settings.changes import changes
from pdproxy.settings.load import EngineFlag, load
from tests.reference import command_line, reference_file, settings

def printed(*arguments):
    out, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(wrong):
        code = main(["config", "print", *arguments])
    return code, out.getvalue(), wrong.getvalue()

# a default, a file, a variable, a flag: each overrides those before, and all are shown
file = Path(sys.argv[1])
file.write_text("limits:\\n  max_bananas: 8\\n  monkeys: [king-louie]\\n")
name, config = "PDPROXY_LIMITS__MAX_BANANAS", ["--config", str(file)]
assert "  max_bananas: 7\\n" in printed()[1]
assert "  max_bananas: 8\\n" in printed(*config)[1]
assert "  monkeys:\\n  - '********'\\n" in printed(*config)[1]
os.environ[name] = "9"
assert "  max_bananas: 9\\n" in printed(*config)[1]
assert "  max_bananas: 10\\n" in printed(*config, "--max-bananas", "10")[1]

assert "  ripeness: 3\\n" in printed("--ripeness", "3")[1]

# bounds
os.environ[name] = "0"
code, _, wrong = printed()
assert code == 2
bounds = "expected a whole number >= 1 and <= 2147483647"
assert f"limits.max_bananas: {bounds}, got \\"0\\" (environment " in wrong, wrong
del os.environ[name]

# pages
row = next(line for line in settings.page().splitlines() if "max_bananas" in line)
assert row == (
    "| `max_bananas` `--max-bananas` | 1 or more | `7` "
    "| Fruit that is held at once. <br>`ripe`: what can be eaten |"
), row
about = settings.page().partition("\\n## limits\\n\\n")[2].partition("\\n\\n")[0]
assert "A change is used at once; of `stalk`, `monkeys` behind a restart; " in about, about
assert "; of `bunch`, " in about and about.endswith(" not from or to 0."), about
comment = "  # Fruit that is held at once.\\n  #   ripe    what can be eaten\\n"
assert comment + "  max_bananas: 7\\n" in reference_file.page()
assert "`--max-bananas N` (`limits.max_bananas`)" in command_line.page()

# a running proxy
async def reload():
    old = load(None, {}, [], [EngineFlag("aggregated", "http://e:1")])
    proxy = Proxy.build(old)
    for fields, at_once, restart in [
        ({"max_bananas": 11}, ("limits.max_bananas",), ()),
        ({"bunch": 2}, ("limits.bunch",), ()),
        ({"bunch": 0}, (), ("limits.bunch",)),
        ({"stalk": 4.0}, (), ("limits.stalk",)),
    ]:
        new = replace(old, limits=replace(old.limits, **fields))
        wanted = changes(old, new)
        assert (wanted.at_once, wanted.restart) == (at_once, restart), wanted
        LiveSettings(proxy, lambda level: None).use(old, wanted.used)
        for name, value in fields.items():
            wanted_value = value if at_once else getattr(old.limits, name)
            assert getattr(proxy.settings.limits, name) == wanted_value, name
        old = wanted.used
    await proxy.stop()
asyncio.run(reload())
print("all of it")
"""


def add(file: Path, docstring: str, fields: str) -> None:
    """Add fields to the section with this docstring."""
    before, start, after = file.read_text().partition(docstring)
    assert start
    end = "" if start.endswith("\n") else after.partition('"""\n')[0] + '"""\n'
    future = "from __future__ import annotations\n"
    before = before.replace(future, f"{future}\nfrom pdproxy.settings.section import Key, Option\n")
    file.write_text(f"{before}{start}{end}{fields}{after.removeprefix(end)}")


def test_a_field_is_all_that_is_declared(tmp_path: Path) -> None:
    """A copy of the package with some more fields has them as options, variables, keys, in its
    pages, and while it runs.
    """
    copy = tmp_path / "pdproxy"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    add(
        copy / "settings" / "limits.py",
        '"""How much is accepted, and how often something is tried."""\n',
        FIELDS,
    )
    add(
        copy / "settings" / "pools.py",
        '"""What is wanted of a request\'s times, in seconds, for placements that predict them.',
        OF_POOLS,
    )
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "settings.yaml")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.stdout == "all of it\n", run.stderr
