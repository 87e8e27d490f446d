"""`/docs` without another host: what the page names, what it is allowed to load, and a client that
does not read its script.
"""

import re
import socket

import pytest

from pdproxy.settings.listen import Cors
from tests.fakes.client import request
from tests.fakes.tls import Side, front
from tests.fakes.world import until, world

FILES = {
    "/docs/swagger-ui-bundle.js": ("text/javascript; charset=utf-8", b"SwaggerUIBundle"),
    "/docs/swagger-ui.css": ("text/css; charset=utf-8", b".swagger-ui"),
    "/docs/favicon.png": ("image/png", b"\x89PNG"),
}


async def test_the_page_and_its_files_name_no_other_host() -> None:
    """The page names three files and the document, all of this server. It needs no key, also where
    other routes do.
    """
    async with world(auth={"api_keys": ("k",)}) as w:
        page = await w.get("/docs")
        assert (page.status, page.header("content-type")) == (200, "text/html; charset=utf-8")
        text = page.body.decode()
        assert "//" not in re.sub(r"<!--.*?-->", "", text)
        assert set(re.findall(r"(?:src|href)=\"([^\"]*)\"", text)) == set(FILES)
        assert re.findall(r"url: '([^']*)'", text) == ["/openapi.json"]
        assert (await w.get("/openapi.json")).status == 200
        for path, (kind, content) in FILES.items():
            answer = await w.get(path)
            assert (answer.status, answer.header("content-type")) == (200, kind)
            assert int(answer.header("content-length") or 0) == len(answer.body) > 1000
            assert content in answer.body
        style = (await w.get("/docs/swagger-ui.css")).body.decode()
        assert "@import" not in style
        assert {url.strip("\"'")[:5] for url in re.findall(r"url\(([^)]*)\)", style)} == {"data:"}


async def test_a_browser_may_load_nothing_from_elsewhere() -> None:
    """The page's policy allows this server alone, and the validator of Swagger UI, which is a
    public server, is off.
    """
    async with world() as w:
        page = await w.get("/docs")
        policy = dict(
            part.split(maxsplit=1)
            for part in (page.header("content-security-policy") or "").split("; ")
        )
        assert policy["default-src"] == "'none'"
        sources = {source for words in policy.values() for source in words.split()}
        assert sources == {"'none'", "'self'", "'unsafe-inline'", "data:"}
        assert '"validatorUrl": null' in page.body.decode()


async def test_the_other_page_of_fastapi_is_off() -> None:
    async with world() as w:
        for path in (
            "/redoc",
            "/docs/oauth2-redirect",
            "/docs/nothing.js",
            "/docs/../openapi.json",
        ):
            assert (await w.get(path)).status == 404


async def test_the_headers_of_the_page_do_not_grow() -> None:
    """Cross-origin headers are added to each answer, not to one that is kept."""
    async with world(cors=Cors(allowed_origins=("https://a",))) as w:
        for path in ("/docs", "/docs/swagger-ui.css"):
            answers = [await w.get(path, [("origin", "https://a")]) for _ in range(3)]
            first, *others = [sorted(one.headers) for one in answers]
            assert ("access-control-allow-origin", "https://a") in {
                (name.lower(), value) for name, value in first
            }
            dates = ("date",)
            for other in others:
                assert [one for one in other if one[0].lower() not in dates] == [
                    one for one in first if one[0].lower() not in dates
                ]


@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_does_not_read_a_script_holds_no_copy_of_it(
    ours: Side, tls: bool
) -> None:
    """Of 1.5 MB only a few pieces wait for it, with TLS as well."""
    more = {"adjust": front(ours), "client_tls": ours.trusting()} if tls else {}
    async with world(**more) as w:  # type: ignore[arg-type]
        client = await w.client(receive_buffer=4096)
        await until(lambda: w.connections)
        (connection,) = w.connections
        # Otherwise the system's own buffer takes most of the script.
        connection.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )
        client.send(request("GET", "/docs/swagger-ui-bundle.js", b""))
        await until(lambda: connection.flow.write_paused)
        assert 0 < connection.transport.get_write_buffer_size() < 100_000
        answer = await client.answer()
        assert len(answer.body) > 1_000_000
