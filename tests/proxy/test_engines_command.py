"""`pdproxy engines`: the client of the admin API."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest

from pdproxy.cli import engines, engines_table
from pdproxy.cli.admin_client import AdminFailed, printable
from pdproxy.cli.engine_figures import figures
from pdproxy.cli.engine_names import short_names
from pdproxy.cli.main import main
from pdproxy.fleet import membership, prober
from pdproxy.fleet.entries import engine_id
from pdproxy.fleet.member import MemberState
from pdproxy.observe.recent import RecentRequest
from tests.fakes.admin import Admin, admin
from tests.fakes.forked import command, piped
from tests.fakes.ports import free_port
from tests.fakes.tls import Side, front
from tests.fakes.world import world
from tests.proxy.test_membership import gone, started, up


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)
    monkeypatch.setattr(engines, "LOOK", 0.01)
    for name in [name for name in os.environ if name.startswith(("PDPROXY_", "COLUMNS"))]:
        monkeypatch.delenv(name)


class Command:
    """Runs it against a world, in a thread."""

    def __init__(self, api: Admin, capsys: pytest.CaptureFixture[str]) -> None:
        self.address = f"127.0.0.1:{api.port}"
        self._capsys = capsys

    async def __call__(self, *words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["engines", *words, "--admin", self.address])
        return code, *self._capsys.readouterr()


async def test_an_engine_comes_and_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """Added, drained, used again and removed; each command waits until it is so."""
    async with world(decode=1) as w, admin(w) as api:
        run = Command(api, capsys)
        new = await started(w, "decode")
        name = new.url.removeprefix("http://")
        code, out, err = await run("add", name, "--role", "decode", "--label", "rack=7", "--wait")
        assert (code, err) == (0, "")
        assert out.startswith("added: it stays until this process ends")
        assert w.proxy.engines[new.url].in_ledger.up
        assert w.proxy.membership.members[new.url].settings.labels == {"rack": "7"}
        code, out, err = await run("drain", name, "--wait", "--seconds", "30")
        assert (code, out, err) == (
            0,
            "draining: it gets no more requests until it is undrained\n",
            "",
        )
        assert w.proxy.membership.state(new.url) is MemberState.DRAINED
        code, out, _ = await run("list")
        (line,) = [one for one in out.splitlines() if one.startswith(name)]
        assert line.split()[:3] == [name, "decode", "drained"]
        assert line.split()[-1] == engine_id(new.url)
        assert f"! {new.url} (decode): drained by admin\n" in out
        assert (await run("undrain", engine_id(new.url), "--wait"))[0] == 0
        assert w.proxy.engines[new.url].in_ledger.available
        code, out, _ = await run("list", "--json")
        assert {one["url"] for one in json.loads(out)["engines"]} == {one.url for one in w.engines}
        code, out, _ = await run("remove", new.url, "--wait", "--json")
        assert (code, json.loads(out)["engine"]) == (0, None)
        await gone(w, new.url)


async def test_what_is_refused_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 with the proxy's reason, 2 for wrong arguments."""
    async with world() as w, admin(w) as api:
        run = Command(api, capsys)
        url = w.decode[0].url
        where = f"{run.address}: "
        for words, code, text in (
            (
                ("remove", url),
                1,
                (
                    f"pdproxy engines remove: {where}{url} was added by settings: admin can't "
                    f"remove "
                    f"it"
                ),
            ),
            (
                ("drain", "127.0.0.1:9"),
                1,
                f"pdproxy engines drain: {where}http://127.0.0.1:9 is no engine of this pool",
            ),
            (("undrain", url), 1, f"pdproxy engines undrain: {where}{url} is not being drained"),
            *(
                (
                    (action, url, "--seconds", text),
                    2,
                    f"pdproxy engines {action}: --seconds: expected 0 to 604800 seconds",
                )
                for action in ("drain", "remove")
                for text in ("-1", "nan", "inf", "604801", "x")
            ),
            (
                ("add", "x:1", "--role", "decode", "--fields", "[1]"),
                2,
                "pdproxy engines add: --fields: expected a JSON",
            ),
            (
                ("add", "x:1", "--role", "decode", "--label", "a"),
                2,
                "pdproxy engines add: --label: expected NAME=VALUE",
            ),
            (
                ("add", "x:1"),
                2,
                "pdproxy engines add: the following arguments are required: --role",
            ),
            (("list", "--json", "--watch"), 2, "pdproxy engines list: --watch: shows a table"),
        ):
            found = await run(*words)
            assert (found[0], found[1]) == (code, ""), found
            assert found[2].startswith(text), found
            assert found[2].count("\n") == (2 if "required" in text or "--seconds" in text else 1)
        new = await started(w, "decode")
        new.stop()
        code, _, err = await run("add", new.url, "--role", "decode", "--wait", "--wait-for", "0.1")
        assert code == 1
        assert "after 0.1 s it is" in err


class Flaky:
    """An admin API whose answers, or failures, are given."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)

    def ask(self, *_: object) -> object:
        """Give the next one; the last one for ever."""
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, AdminFailed):
            raise answer
        return answer


def test_waiting_outlives_a_worker_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends with it, or another worker can't say whether it has the engine. Other
    failures are final.
    """
    monkeypatch.setattr(engines, "SILENCE", 0.1)
    lost, unknown = (
        AdminFailed("no connection: Connection reset by peer"),
        AdminFailed("worker 1 is silent", 503),
    )
    gone, refused = (
        AdminFailed("no such engine", 404),
        AdminFailed("Incorrect API key provided.", 401),
    )
    serving = {"state": "serving", "health": {"state": "up", "reason": None}, "drain": None}
    leaves = {
        "state": "draining",
        "health": {"state": "draining", "reason": None},
        "drain": {"removes": True},
    }
    arguments = argparse.Namespace(wait_for=60.0)

    def waited(*answers: object, states: tuple[str, ...] = ()) -> object:
        return engines._until(Flaky(*answers), {"engine": {"id": "x"}}, arguments, *states)  # type: ignore[arg-type]

    assert waited(lost, unknown, serving, states=("serving",)) is serving
    assert waited(leaves, lost, unknown, gone) is None
    with pytest.raises(AdminFailed, match="reset by peer"):  # for ever
        waited(lost)
    with pytest.raises(AdminFailed, match="Incorrect"):
        waited(refused, serving, states=("serving",))
    with pytest.raises(AdminFailed, match="no such engine"):
        waited(gone, serving, states=("serving",))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "no connection: Connection refused"),
        (b"garbage\r\n\r\n", "does not answer HTTP"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno",
            "answered 200 without JSON: is it the admin API?",
        ),
        (
            b"HTTP/1.1 404 X\r\ncontent-length: 22\r\n\r\n" + b'{"detail":"Not Found"}',
            "answered 404 without a message: is it the admin API?",
        ),
        (b'HTTP/1.1 400 X\r\n\r\n{"error": {"message": "a\\u001b[31mb"}}', "a?[31mb"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", "no answer within 0.3 s"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 70_000, "too large"),
    ],
)
async def test_what_is_no_admin_api(
    sent: bytes, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever answers there: one line, exit code 1, in time."""
    monkeypatch.setattr("pdproxy.cli.admin_client.MAX_ANSWER", 65_536)
    port = free_port()
    server = None
    if sent:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(sent)
            if b"length: 9" not in sent:
                writer.write_eof()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", port)
    words = [
        "engines",
        "list",
        "--json",
        "--admin",
        f"127.0.0.1:{port}",
        "--timeout",
        "0.3" if b": 9" in sent else "60",
    ]
    code = await asyncio.to_thread(main, words)
    out, err = capsys.readouterr()
    if server is not None:
        server.close()
    assert (code, out) == (1, "")
    assert err.startswith(f"pdproxy engines list: 127.0.0.1:{port}: ")
    assert why in err
    assert err.count("\n") == 1


def test_which_proxy_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the settings by default, with its key."""
    assert main(["engines", "list"]) == 2
    assert capsys.readouterr().err == (
        "pdproxy engines list: no admin API is named: give --admin, or listen.admin in the "
        "settings (off by default)\n"
    )
    for words, text in (
        (["--admin", "x"], '--admin: "x": expected unix:PATH, HOST:PORT or https://HOST:PORT'),
        (["--admin", "http://h:1"], '--admin: "http://h:1": expected'),
        (["--admin", "h:0"], '--admin: "h:0": expected'),
        (["--admin", "h:1", "--ca", "x"], "--ca: has no effect without https://"),
        (["--admin", "h:1", "--admin-key-file", str(tmp_path / "none")], "can't be read"),
    ):
        assert main(["engines", "list", *words]) == 2
        assert text in capsys.readouterr().err
    path = tmp_path / "x.yaml"
    path.write_text(f"listen: {{admin: 'unix:{tmp_path}/none.sock'}}")
    assert main(["engines", "list", "--config", str(path)]) == 1
    assert capsys.readouterr().err == (
        f"pdproxy engines list: unix:{tmp_path}/none.sock: no connection: No such file or "
        f"directory: does the proxy run, with listen.admin there?\n"
    )


async def test_keys_and_tls(ours: Side, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The key of a file, or of the settings; with TLS the certificate of the settings is the one
    that is expected.
    """
    keys = tmp_path / "keys"
    keys.write_text("# operators\nops:secret\n")
    auth = {"admin_keys_file": str(keys)}
    listening = front(ours)
    async with world(auth=auth, adjust=listening) as w, admin(w) as api:
        address = f"https://127.0.0.1:{api.port}"
        alone = tmp_path / "key"
        alone.write_text("secret\n")
        words = ["engines", "list", "--json", "--admin", address]
        for more, code in (
            (["--ca", str(ours.authority), "--admin-key-file", str(alone)], 0),
            (["--ca", str(ours.authority)], 1),
            (["--admin-key-file", str(alone)], 1),
        ):
            assert await asyncio.to_thread(main, [*words, *more]) == code
        out, err = capsys.readouterr()
        assert len(json.loads(out)["engines"]) == 2
        assert "didn't provide an API key" in err
        assert "its certificate is not trusted" in err
        own = ["--ca", str(ours.authority), "--admin-key-file", str(keys)]
        assert await asyncio.to_thread(main, [*words, *own]) == 0
        config = tmp_path / "x.yaml"
        tls = f"{{certificate: {ours.certificate}, key: {ours.key}}}"
        config.write_text(
            f"listen: {{admin: '0.0.0.0:{api.port}', tls: {tls}}}\nauth: {{admin_keys_file: "
            f"{keys}}}\n"
        )
        assert (
            await asyncio.to_thread(main, ["engines", "list", "--json", "--config", str(config)])
            == 0
        )


async def test_the_live_table(capsys: pytest.CaptureFixture[str]) -> None:
    """It shows engines, and what is wrong; a proxy that does not answer is named, and asked
    again.
    """
    async with world(prefill=1, decode=2) as w, admin(w) as api:
        other = await started(w, "decode", version="9.9")
        await api.post("/engines", {"url": other.url, "role": "decode"})
        await up(w, other)
        listed, recent = await api.get("/engines"), await api.get("/requests")
    entries = engines_table.in_order(listed["engines"])
    assert [one["role"] for one in entries] == ["prefill", "decode", "decode", "decode"]
    rows = {row["engine"]: row for row in engines_table.rows(entries, {}, 60.0)}
    assert rows[other.url]["pairs"] == "0 of 1"
    (text,) = engines_table.wrong(entries)
    assert text.startswith(f"{other.url} (decode): not paired with {w.prefill[0].url}: ")
    assert "different versions" in text
    answers: list[AdminFailed | tuple[dict[str, object], dict[str, object]]] = [
        (listed, recent),
        AdminFailed("no connection"),
        ({**listed, "engines": entries[:1]}, recent),
    ]

    def ask() -> tuple[dict[str, object], dict[str, object]]:
        found = answers.pop(0)
        if isinstance(found, AdminFailed):
            raise found
        return found

    engines_table.watch(ask, 0.001, rounds=3)
    assert "1 engines" in capsys.readouterr().out
    assert answers == []


def _entry(url: str, role: str, **fields: object) -> dict[str, object]:
    return {
        "id": engine_id(url),
        "url": url,
        "pool": "default",
        "role": role,
        "source": "settings",
        "state": "serving",
        "health": {"state": "up", "reason": None},
        "load": {"requests": 3, "kv_usage": 0.634},
        "breaker": {"open_for_s": 0.0},
        "waits": None,
        "slow": [],
        "pairs": {"paired": 1, "not_paired": [], "not_paired_count": 0},
        "drain": None,
        "labels": {},
        **fields,
    }


NO_REQUESTS: dict[str, object] = {"requests": [], "silent_workers": []}


def test_80_columns_show_what_is_wrong_first_and_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No word of it is lost, no line is longer, and a pair is told once."""
    monkeypatch.setenv("COLUMNS", "80")
    name = "http://vllm-{0}-{1}.vllm-{0}.default.svc.cluster.local:8000"
    first, second, third = (name.format(*one) for one in (("p", 0), ("p", 1), ("d", 0)))
    reason = "no connection: " + "the engine has refused the connection " * 4
    why = "different versions: 0.33.0 and 0.34.1"
    of_second = {"paired": 0, "not_paired": [{"url": third, "why": why}], "not_paired_count": 1}
    of_third = {
        "paired": 0,
        "not_paired": [{"url": second, "why": why}, {"url": first, "why": "not probed yet"}],
        "not_paired_count": 2,
    }
    listed = {
        "engines": [
            _entry(third, "decode", pairs=of_third),
            _entry(first, "prefill", health={"state": "down", "reason": reason}),
            _entry(second, "prefill", pairs=of_second),
        ]
    }
    engines_table.show(listed, NO_REQUESTS)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    told, _, table = out.partition("engine  ")
    words = " ".join(told.split())
    assert f"! {first} (prefill): down: {reason.strip()}" in words
    assert words.count(why) == 1
    assert "not probed yet" not in words, "who is down is paired with nobody"
    assert table.split()[:7] == ["role", "state", "requests", "latency", "tokens/s", "KV", "failed"]
    assert "63%" in table


def test_engines_of_pods_are_named_by_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table where it is wide, and in front of what is wrong. Without pods no column is
    there.
    """
    monkeypatch.setenv("COLUMNS", "160")
    url = "http://10.0.0.1:8000"
    of_pod = _entry(
        url, "decode", labels={"pod": "llama-d-0"}, health={"state": "down", "reason": "gone"}
    )
    engines_table.show({"engines": [of_pod]}, NO_REQUESTS)
    told, _, table = capsys.readouterr().out.partition("engine  ")
    assert "http://10.0.0.1:8000 (decode, pod llama-d-0): down: gone" in told
    assert "pod" in table.splitlines()[0].split()
    assert "llama-d-0" in table
    engines_table.show({"engines": [_entry(url, "decode")]}, NO_REQUESTS)
    assert "pod" not in capsys.readouterr().out.split()


def test_engines_whose_revision_gets_no_requests_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    why = "revision v2 gets no requests: it has no prefill engine that is up"
    engines_table.show({"engines": [_entry("http://d:1", "decode", waits=why)]}, NO_REQUESTS)
    assert f"http://d:1 (decode): {why}" in capsys.readouterr().out


def test_urls_that_are_cut_differ() -> None:
    """They are cut at a place where all differ; where there is none, they are whole."""
    urls = [f"http://decode-{number}.engines.example:8000" for number in range(12)]
    assert short_names(urls, 40) == [url.removeprefix("http://") for url in urls]
    short = short_names(urls, 19)
    assert short[0] == "decode-0...ple:8000"
    assert len(set(short)) == 12
    assert {len(one) for one in short} == {19}
    assert len(set(short_names(urls, 14))) == 12
    alike = [f"http://a.very.long.name.{number}.of.an.engine:8000" for number in range(2)]
    assert short_names(alike, 14) == [url.removeprefix("http://") for url in alike]


def ended(
    ended_s: float, prompt_fields: Mapping[str, object] = MappingProxyType({}), **fields: object
) -> RecentRequest:
    """A request whose stream has ended, as the admin API shows it; and other values of its fields,
    or of its prompt's.
    """
    prompt = {
        "prefill": "p",
        "decode": "d",
        "why_alone": None,
        "attempts": 1,
        "tokenize_s": None,
        "encode_s": None,
        "prefill_s": 0.2,
        "first_s": 0.4,
        "decode_s": 1.0,
        "whole_s": None,
        "decision": None,
        "continued": 0,
        "pause_s": None,
        **prompt_fields,
    }
    found = {
        "id": "x",
        "ended_s": ended_s,
        "phase": None,
        "method": "POST",
        "path": "/v1/completions",
        "model": None,
        "status": 200,
        "outcome": "ok",
        "error": None,
        "reason": None,
        "stream": True,
        "client": None,
        "key": None,
        "tenant": None,
        "queue_s": 0.0,
        "first_s": 0.6,
        "total_s": 2.0,
        "prompt_tokens": 300,
        "completion_tokens": 60,
        "prompts": [prompt],
        "prompt_count": 1,
        "failures": [],
        **fields,
    }
    return msgspec.convert(found, RecentRequest)


def test_figures_are_those_of_the_last_minute() -> None:
    """The median latency of a role's leg, the tokens of what has ended, the legs that failed."""
    failed = {"at_s": 1.5, "engine": "d", "phase": "decode", "error": "500", "retried": True}
    requests = [
        ended(1.0),
        ended(2.0, {"first_s": 0.8, "prefill_s": 0.1}),
        ended(59.0, {"first_s": 9.0}, failures=[failed, {**failed, "at_s": 0.1}]),
        ended(61.0, failures=[failed]),
        ended(3.0, {"decode": "whole", "prefill": None, "first_s": None, "whole_s": 5.0}),
    ]
    seconds, found = figures(requests)
    assert seconds == 60.0
    assert (found["p"].latency, found["p"].tokens, found["p"].failures) == (0.2, 900, 0)
    assert (found["d"].latency, found["d"].tokens, found["d"].failures) == (0.8, 180, 1)
    assert found["whole"].latency == 5.0
    # More have ended than are kept: the oldest one shows since when.
    seconds, found = figures([ended(4.0)] * 256)
    assert seconds == 4.0
    (row,) = engines_table.rows([_entry("d", "decode")], found, seconds)
    assert (row["latency"], row["tokens/s"]) == ("400 ms", "3840")


def test_nothing_that_an_engine_says_controls_the_terminal() -> None:
    assert printable("a\x1b[31m\n\u202eb") == "a?[31m??b"


async def test_a_real_process(tmp_path: Path) -> None:
    """`serve --admin` listens there, `engines` finds it by the settings, and the socket is gone at
    the end.
    """
    path, port = tmp_path / "pdproxy.yaml", free_port()
    at = tmp_path / "admin.sock"
    url = f"http://127.0.0.1:{free_port()}"
    path.write_text(
        f"listen: {{port: {port}, admin: 'unix:{at}'}}\npools:\n- nodes:\n  - {{url: '{url}', "
        f"role: aggregated}}\n"
    )

    async def run(*words: str) -> tuple[int, str, str]:
        process = await piped(*words, env=os.environ)
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    code, _, err = await run(
        "serve", "--decode", "a:1", "--port", str(port), "--admin", f"0.0.0.0:{free_port()}"
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "others than this machine can reach it" in err
    serving = command("serve", "--config", str(path), env=os.environ)
    try:
        async with asyncio.timeout(100):  # to start takes long where nothing is idle
            while True:
                code, out, err = await run("engines", "list", "--json", "--config", str(path))
                if code == 0:
                    break
                assert "no connection" in err
                assert serving.returncode is None
        assert [one["url"] for one in json.loads(out)["engines"]] == [url]
    finally:
        serving.send_signal(signal.SIGTERM)
        assert await serving.wait() == 0
    assert not at.exists()


@pytest.mark.parametrize("sent", [b"{}", b"[]", b"null", b'{"engines": [{}]}', b'{"engines": [3]}'])
@pytest.mark.parametrize(
    "words", [["list"], ["list", "--watch"], ["drain", "x:1"], ["remove", "x:1", "--wait"]]
)
async def test_json_of_something_else(
    sent: bytes, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, no traceback."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(sent) + sent)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    code = await asyncio.to_thread(main, ["engines", *words, "--admin", address])
    server.close()
    err = capsys.readouterr().err
    assert code == 1
    assert (
        err == f"pdproxy engines {words[0]}: {address}: its answer can't be read: is it the admin "
        f"API, of this version?\n"
    )
