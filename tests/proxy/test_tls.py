"""TLS on both sides: clients in front, engines behind, certificates that change, and what is
reported of untrusted ones.
"""

import asyncio
import datetime
import logging
import ssl
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from pdproxy.app.credentials import CERTIFICATE_END
from pdproxy.cli.main import main
from pdproxy.observe.events import RequestEnded
from pdproxy.settings.schema import Settings
from tests.fakes import answers, scripts
from tests.fakes.client import Client, request
from tests.fakes.engine import Reply
from tests.fakes.tls import BIG, Side, behind, front, fronted
from tests.fakes.world import (
    CHAT,
    CHAT_TEXT,
    COMPLETIONS,
    LONG,
    TEXT,
    chat,
    completion,
    until,
    world,
)

# -- clients


@pytest.mark.parametrize("stream", [False, True])
async def test_the_data_path_and_fastapi_speak_tls(ours: Side, stream: bool) -> None:
    """Both halves of the server answer through TLS as they do without it."""
    async with fronted(ours) as w:
        answer = await w.ask(COMPLETIONS, completion(stream=stream))
        assert (answer.status, answer.text, answer.ended) == (200, TEXT, True)
        assert (await w.get("/ready")).json["ready"] is True


async def test_both_sides_at_once(ours: Side, theirs: Side) -> None:
    """Clients and engines in TLS by different authorities."""

    def adjust(settings: Settings) -> Settings:
        return behind(ca=theirs.authority)(front(ours)(settings))

    async with world(adjust=adjust, client_tls=ours.trusting(), engine_tls=theirs.server()) as w:
        assert (await w.ask(CHAT, chat(stream=True))).text == CHAT_TEXT


async def test_plain_http_to_a_tls_port_is_no_request(ours: Side) -> None:
    """A client without TLS gets no answer, and the next one with it does."""
    async with fronted(ours) as w:
        plain = await Client.connect(w.port)
        plain.send(request("GET", "/health", b""))
        assert await plain.closed()
        assert (await w.get("/health")).status == 200


async def test_http_1_0_ends_with_the_connection(ours: Side) -> None:
    """A stream to HTTP/1.0 has no chunks: TLS's own end is the body's end."""
    async with fronted(ours) as w:
        answer = await w.exchange(
            request("POST", COMPLETIONS, completion(stream=True), version="1.0")
        )
        assert answer.header("transfer-encoding") is None
        assert answer.text == TEXT
        assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_requests_in_the_pipeline(ours: Side) -> None:
    """Requests sent at once are answered in their order."""
    async with fronted(ours) as w:
        client = await w.client()
        one = request("POST", COMPLETIONS, completion())
        client.send(
            one + request("POST", CHAT, chat(stream=True)) + request("GET", "/health", b"") + one
        )
        answers = [await client.answer() for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert [answers[0].text, answers[1].text, answers[3].text] == [TEXT, CHAT_TEXT, TEXT]


async def test_a_prompt_of_64_kib(ours: Side) -> None:
    """A body of several TLS records arrives whole, in pieces of any size."""
    async with fronted(ours, facts={"max_model_len": 65_536}) as w:
        ids = [5] * (32 * 1024)
        client = await w.client()
        data = request("POST", COMPLETIONS, completion(prompt=ids, max_tokens=1))
        assert len(data) > 64 * 1024
        for start in range(0, len(data), 10_007):
            client.send(data[start : start + 10_007])
            await asyncio.sleep(0)
        answer = await client.answer()
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["prompt_tokens"] == len(ids)


async def test_a_refused_body_is_no_next_request(ours: Side) -> None:
    """TLS's own goodbye takes a while: a good request that comes behind a refused one is not served
    in between.
    """

    def adjust(settings: Settings) -> Settings:
        auth = msgspec.structs.replace(settings.auth, api_keys=("one",))
        return msgspec.structs.replace(front(ours)(settings), auth=auth)

    async with world(adjust=adjust, client_tls=ours.trusting()) as w:
        good = request("POST", COMPLETIONS, completion(), [("authorization", "Bearer one")])
        client = await w.client()
        head = request("POST", COMPLETIONS, b"", [("authorization", "Bearer two")])
        client.send(head.replace(b"content-length: 0", b"content-length: 4"))
        assert (await client.answer()).status == 401
        client.send(b"body" + good)
        assert await client.closed()
        await until(lambda: not w.tasks)
        assert len(w.events(RequestEnded)) == 1
        assert not [r for engine in w.engines for r in engine.requests]


@pytest.mark.parametrize("leave", ["close", "reset", "half"])
async def test_a_client_that_leaves_mid_stream_ends_its_request(ours: Side, leave: str) -> None:
    """A close with and without TLS's goodbye, and a half-close, cancel: the engine sees its client
    leave.
    """
    async with fronted(ours, leaves=True) as w:
        w.decode[0].script(scripts.streams(scripts.WORD, then="stall"))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        assert (await client.head()).status == 200
        await client.piece()
        if leave == "half":
            client.writer.close()  # sends close_notify, and waits for the proxy's
        else:
            getattr(client, leave)()
        ended = await w.ended()
        assert (ended.outcome, ended.status) == ("client_left", 200)
        await w.quiet()


async def test_a_client_that_stops_reading_is_dropped(ours: Side) -> None:
    """Write pressure works below TLS: D is paused, and the deadline of `client_write` ends it."""

    async def flood(reply: Reply) -> None:
        await reply.start()
        while True:
            await reply.piece(BIG)

    async with fronted(ours, deadlines={"client_write": 0.3}) as w:
        w.decode[0].script(flood)
        client = await w.client(receive_buffer=16384)
        client.post(COMPLETIONS, completion(stream=True))
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(w.decode[0].requests[0].left.wait(), LONG)
        assert w.metric("pdproxy_deadline_total", wait="client_write") == 1
        assert w.metric("pdproxy_deadline_total", wait="between_tokens") == 0
        assert (await w.ended()).outcome == "client_left"


async def test_a_whole_answer_that_is_not_read_is_counted_below_tls(ours: Side) -> None:
    """The connection below TLS would take all of it unseen. The request behind it waits, and both
    answers come whole.
    """
    size = 16 << 20  # far more than the kernel takes of it
    async with fronted(ours, prefill=0) as w:
        w.decode[0].script(*[scripts.whole(answers.whole(False, [1, 2, 3], "x" * size, 4))] * 2)
        client = await w.client(receive_buffer=16384)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(request("POST", COMPLETIONS, completion()) * 2)
        unread = [one.unread_answers for one in w.workers]
        await until(lambda: any(one.held > size // 2 for one in unread))
        await w.ended()
        assert w.metric("pdproxy_held_bytes", what="unread") > size // 2
        assert len(w.decode[0].requests) == 1
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(2):
            assert len((await client.answer()).text) == size
        await until(lambda: not any(one.held for one in unread))


async def test_a_client_that_reads_on_gets_all_of_a_large_stream(ours: Side) -> None:
    """A pause of the client loses nothing and ends nothing."""
    async with fronted(ours) as w:
        w.decode[0].script(scripts.streams(*[BIG] * 400, answers.end()))
        client = await w.client(receive_buffer=16384)
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: any(one.flow.write_paused for one in w.connections))
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.rest(head)
        assert answer.ended
        assert answer.body.count(b"x") >= 400 * 30_000


async def test_a_client_needs_a_certificate_where_an_authority_is_set(
    ours: Side, theirs: Side
) -> None:
    """None or another authority's is no connection; the right one is."""
    async with world(adjust=front(ours, client_ca=theirs.authority)) as w:
        for own in (None, ours):
            w.tls = ours.trusting(own)
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await w.get("/health")
        w.tls = ours.trusting(theirs)
        assert (await w.get("/health")).status == 200
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT


# -- certificates that change


def serial(client: Client) -> str:
    """Which certificate the proxy has shown."""
    shown: dict[str, Any] = client.writer.get_extra_info("ssl_object").getpeercert()
    return str(shown["serialNumber"])


async def test_a_renewed_certificate_is_shown_to_new_connections_and_drops_none(ours: Side) -> None:
    """A stream that was open goes on over its old certificate; the next connection sees the new
    one.
    """
    async with fronted(ours) as w:
        old = await w.client()
        old.post(COMPLETIONS, completion())
        assert (await old.answer()).status == 200
        ours.sign()
        w.look_at_files()
        new = await w.client()
        assert serial(new) != serial(old)
        for client in (old, new):
            client.post(COMPLETIONS, completion())
            assert (await client.answer()).text == TEXT


async def test_the_running_proxy_looks_by_itself(
    ours: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It notices by itself that a certificate was renewed."""
    monkeypatch.setattr("pdproxy.app.credentials.LOOK_EVERY", 0.01)
    async with fronted(ours) as w:
        before = serial(await w.client())
        ours.sign()

        async def changed() -> bool:
            return serial(await w.client()) != before

        async with asyncio.timeout(LONG):
            while not await changed():
                await asyncio.sleep(0.01)


async def test_a_certificate_that_expires_is_reported(
    ours: Side, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two days before its end and afterwards: in /ready, once in the log, and by `config validate`;
    a renewed one ends it.
    """
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)

    def logged() -> list[str]:
        return [
            r.getMessage() for r in caplog.records if "listen.tls.certificate" in r.getMessage()
        ]

    async with fronted(ours) as w:
        assert (await w.get("/ready")).json["details"] == []
        for ends, said in ((now + day, ": renew it"), (now - day, ": clients refuse it")):
            caplog.clear()
            ours.sign(not_before=now - 9 * day, not_after=ends)
            for _ in range(3):
                w.look_at_files()
            (line,) = logged()
            assert line.endswith(f"{ends:%Y-%m-%d %H:%M} UTC{said}")
            assert line in w.proxy.credentials.shortcomings()
            assert line in w.proxy.credentials.warnings()
            assert w.metric(CERTIFICATE_END.name) == int(ends.timestamp())
            tls = ["--ssl-certfile", ours.certificate, "--ssl-keyfile", ours.key]
            assert main(["config", "validate", "--decode", "127.0.0.1:1", *tls]) == 0
            assert line in capsys.readouterr().err
        ours.sign()
        w.look_at_files()
        assert (await w.get("/ready")).json["details"] == []


async def test_half_of_a_renewal_changes_nothing(
    ours: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """A key without its certificate is logged once, and is in /ready; the pair before stays in use
    until both are there.
    """
    async with fronted(ours) as w:
        before = serial(await w.client())
        old = Path(ours.certificate).read_bytes()
        ours.sign()
        new = Path(ours.certificate).read_bytes()
        Path(ours.certificate).write_bytes(old)
        for _ in range(3):
            w.look_at_files()
        assert serial(await w.client()) == before
        (logged,) = [
            r.getMessage()
            for r in caplog.records
            if r.levelno == logging.ERROR and r.name == "pdproxy.files"
        ]
        assert "the key is not the certificate's" in logged
        assert any(
            "the key is not the certificate's" in line
            for line in (await w.get("/ready")).json["details"]
        )
        Path(ours.certificate).write_bytes(new)
        w.look_at_files()
        assert serial(await w.client()) != before
        assert (await w.get("/ready")).json["details"] == []


async def test_an_authority_that_is_taken_out_lets_nobody_in_any_more(
    ours: Side, theirs: Side
) -> None:
    """Clients of the old authority are refused after the change, also those that were here
    before.
    """
    async with world(adjust=front(ours, client_ca=theirs.authority)) as w:
        w.tls = ours.trusting(theirs)
        assert (await w.get("/health")).status == 200
        trustme.CA().cert_pem.write_to_path(theirs.authority)
        w.look_at_files()
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await w.get("/health")
        theirs.ca.cert_pem.write_to_path(theirs.authority)
        w.look_at_files()
        assert (await w.get("/health")).status == 200
