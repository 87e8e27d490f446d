"""The recipe of docs/internals/contributing.md for a source of engines: a section, its field, and a
module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pdproxy
from pdproxy.settings.schema import SOURCES, source_kind

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pdproxy.__file__).parent
SECTION = '''
"""Boxes of toys: files that name engines, one address in each line."""

from __future__ import annotations

from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, quote, spell_key
from pdproxy.settings.section import Seconds, Text
from pdproxy.settings.sources import SourceSection


class Toys(SourceSection, frozen=True):
    """How engines are found whose URLs are toys://BOX: those of a file."""

    schemes = {"toys": "http"}
    who = "a box of toys"
    forms = "toys://BOX: all in a box"

    room: Text = "/nowhere"
    """The folder of the boxes."""

    interval: Seconds = 0.02
    """Seconds between two looks."""

    patience: Seconds = 1.0
    """No less than the interval."""

    @classmethod
    def spelled(cls, url: str, path: KeyPath, where: str = "") -> str:
        box = url.partition("://")[2].lower()
        if not box.isalnum():
            raise SettingsError(f"{spell_key(path)}: {quote(url)}: expected toys://BOX{where}")
        return f"toys://{box}"

    def check(self, found: Mistakes) -> None:
        if self.patience < self.interval:
            found.add(("toys",), "toys.patience is less than toys.interval")
'''
FIELD = "    toys: Toys = Toys()\n"
SOURCE = '''
"""A source of engines that looks into a file."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from pdproxy.fleet.sources import FoundEngine, SourceAnswer
from pdproxy.settings.schema import Settings
from pdproxy.settings.toys import Toys


def source(url: str, settings: Settings) -> "ToySource":
    return ToySource(Path(settings.toys.room) / url.removeprefix("toys://"), settings.toys)


class ToySource:
    def __init__(self, box: Path, toys: Toys) -> None:
        self._box, self._toys = box, toys

    async def run(self, answered: Callable[[SourceAnswer], None]) -> None:
        while True:
            try:
                lines = self._box.read_text().split()
            except OSError:
                answered(SourceAnswer(None, "the box is closed"))
            else:
                if lines == ["broken"]:
                    raise ValueError("broken")
                answered(SourceAnswer([FoundEngine(f"http://{line}") for line in lines]))
            await asyncio.sleep(self._toys.interval)
'''
SCRIPT = '''
import asyncio, contextlib, io, sys
from pathlib import Path
from msgspec.structs import replace
from pdproxy.app.first_probes import first_probes
from pdproxy.app.live import LiveSettings
from pdproxy.app.signals import Ending
from pdproxy.check.security.rules import RULES
from pdproxy.cli.main import main
from pdproxy.fleet import membership, prober
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import load
from pdproxy.settings.toys import Toys
from tests.fakes.world import COMPLETIONS, TEXT, completion, until, world
from tests.proxy.test_membership import gone, started, up
from tests.reference import command_line, reference_file, settings

def printed(*arguments):
    out, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(wrong):
        code = main([*arguments])
    return code, out.getvalue(), wrong.getvalue()

# settings: a file and flags name sources among the engines; they are spelled, checked, printed, and read again
room = Path(sys.argv[1])
file = room / "settings.yaml"
file.write_text("""
toys: {interval: 3, patience: 4}
pools: [{nodes: [{url: 'http://p:1', role: prefill}, {url: 'TOYS://Box', role: decode, labels: {rack: r}}]}]
""")
code, text, _ = printed("config", "print", "--config", str(file), "--decode", "d:1")
assert [line.split()[-1] for line in text.splitlines() if "- url:" in line] == ["http://p:1", "toys://box", "http://d:1"]
assert "toys:\\n  room: /nowhere\\n  interval: 3.0\\n  patience: 4.0\\n" in text
(room / "printed.yaml").write_text(text)
assert printed("config", "print", "--config", str(room / "printed.yaml"))[1] == text
for arguments, why in [
    (("--decode", "toys://a/b"), 'pools[0].nodes[0].url: "toys://a/b": expected toys://BOX (--decode)'),
    (("--decode", "toys://box", "toys://BOX"), "toys://box is given twice"),
    (("--decode", "toys://box", "--connector", "auto"), "engines that a box of toys names can't be asked for it"),
    (("--config", str(file), "--connector", "lmcache-pd"), "needs init_ports and alloc_ports of http://box:1"),
]:
    code, _, wrong = printed("config", "validate", *arguments)
    assert code == 2 and why in wrong, wrong
file.write_text("toys: {interval: 3}")
assert printed("config", "print", "--config", str(file))[2].endswith("toys.patience is less than toys.interval\\n")
code, _, wrong = printed("check", "--decode", "toys://box")
assert code == 2 and "toys://box: this command takes no engines that a box of toys names" in wrong, wrong
code, text, _ = printed("check", "--security", "--decode", "toys://box")
assert "toys://box: prompts and the engines' key cross a network as they are" in text, text

# pages
assert "## toys\\n" in settings.page() and "| `interval` | seconds" in settings.page()
assert "\\ntoys:\\n  # The folder of the boxes.\\n" in reference_file.page()
assert "; toys://BOX: all in a box |" in command_line.page()

# a running proxy
def adjust(old):
    nodes = ConfiguredEngine(url="toys://box", role="decode"), ConfiguredEngine(url="toys://other", role="decode", labels={"rack": "1"})
    pool = replace(old.pool, nodes=(*old.pool.nodes, *nodes))
    return replace(old, pools=(pool,), toys=Toys(room=str(room)))

def has(box, *engines):
    (room / box).write_text("\\n".join(engine.url.removeprefix("http://") for engine in engines))

async def serve():
    membership.LOOK = prober.MIN_GAP = 0.01
    async with world(decode=1, adjust=adjust) as w:
        proxy = w.proxy
        one, two, three = [await started(w, "decode") for _ in range(3)]
        has("box", one, two)
        proxy.sources.start()
        await first_probes(proxy, Ending())
        (shown,) = (await w.get("/ready")).json["details"]
        assert shown.startswith("toys://other: the box is closed, for ")
        assert shown.endswith(" s: no engine of it is known")
        for engine in (one, two):
            assert proxy.engines[engine.url].in_ledger.up
            assert proxy.membership.members[engine.url].source == "toys://box"
        for _ in range(6):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert one.requests and two.requests
        assert w.metric("pdproxy_source_engines", source="toys://box") == 2
        assert w.metric("pdproxy_source_answers_total", source="toys://other", result="failed") > 0
        assert "pdproxy_dns_engines{" not in w.page().decode()

        # an engine goes, another one comes
        has("box", two, three)
        await gone(w, one.url)
        await up(w, three)
        members = proxy.membership.members
        # a source that breaks keeps its engines, is named, and leaves the others alone
        (room / "box").write_text("broken")
        await until(lambda: any("toys://box has failed" in text for text in proxy.readiness().details))
        has("other", one)
        await until(lambda: one.url in members)
        await up(w, one)
        assert members[one.url].settings.labels == {"rack": "1"}
        assert members[two.url].drain is None and members[three.url].drain is None

        # a reload: other settings of one source, and the other one is given up
        old, live = proxy.settings, LiveSettings(proxy, lambda level: None)
        box, other = old.pool.source_nodes
        wrong = replace(box, api_key_file=str(room / "missing"))
        try:
            live.use(old, replace(old, pools=(replace(old.pool, nodes=(*old.pool.fixed_nodes, wrong)),)))
        except SettingsError:
            pass
        else:
            raise AssertionError
        assert members[two.url].settings.api_key_file is None and members[one.url].drain is None
        labelled = replace(box, labels={"rack": "2"})
        live.use(old, replace(old, pools=(replace(old.pool, nodes=(*old.pool.fixed_nodes, labelled)),)))
        assert members[two.url].settings.labels == {"rack": "2"}
        await gone(w, one.url)
        assert [found.name for found in proxy.sources.found] == ["toys://box"]
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT

asyncio.run(serve())
print("all of it")
'''  # noqa: E501


def test_a_section_a_field_and_a_module_are_a_source(tmp_path: Path) -> None:
    """A copy of the package with another source has it in its settings, commands and pages, and
    follows it while it runs.
    """
    copy, room = tmp_path / "pdproxy", tmp_path / "room"
    room.mkdir()
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    (copy / "settings" / "toys.py").write_text(SECTION)
    (copy / "fleet" / "toys_source.py").write_text(SOURCE)
    schema = copy / "settings" / "schema.py"
    before, last, after = schema.read_text().partition(
        "    kubernetes: Kubernetes = Kubernetes()\n"
    )
    future = "from __future__ import annotations\n"
    before = before.replace(future, f"{future}\nfrom pdproxy.settings.toys import Toys\n")
    schema.write_text(f"{before}{last}{FIELD}{after}")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(room)],
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
    assert run.stdout == "all of it\n", run.stdout + run.stderr


@pytest.mark.parametrize("kind", SOURCES)
def test_each_kind_has_its_module(kind: str) -> None:
    """Which has the function that makes a source, and schemes that no other kind has."""
    assert callable(import_module(f"pdproxy.fleet.{kind}_source").source)
    assert {source_kind(f"{scheme}://x") for scheme in SOURCES[kind].schemes} == {kind}
