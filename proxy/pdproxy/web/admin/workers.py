"""The routes with which vllm-router's engines are managed, with its shapes: what was written for it
works here.

Three things differ: an engine is drained before it is removed, one that is not there is a 404, and
a role must fit the pool. Of several pools a new engine comes into the one that `labels.pool` names,
or else the only one that serves its `model_id`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from pdproxy.fleet.entries import EngineEntry
from pdproxy.kit.errors import BadRequestError, PdproxyError
from pdproxy.settings.errors import did_you_mean, quote
from pdproxy.web.admin.api import AdminApi
from pdproxy.web.admin.bodies import body_of, flag_of, query_of
from pdproxy.web.admin.changes import Change
from pdproxy.web.admin.errors import ConflictError, NotThereError
from pdproxy.web.admin.service import AdminService
from pdproxy.web.admin.shapes import EngineChanged

ROLES = {"regular": "aggregated", "prefill": "prefill", "decode": "decode"}
_NAMES = {role: name for name, role in ROLES.items()}
_IGNORED = (
    "priority",
    "cost",
    "runtime",
    "tokenizer_path",
    "reasoning_parser",
    "tool_parser",
    "chat_template",
)
"""Fields of vllm-router that change nothing here."""
_KNOWN = ("url", "worker_type", "bootstrap_port", "labels", "api_key", "model_id", *_IGNORED)


def add_workers(app: FastAPI, api: AdminApi) -> None:
    """Add the routes."""

    async def workers(request: Request) -> Response:
        query_of(request, ())
        entries = (await api.engines(pairs=False)).engines
        return JSONResponse(_listed(entries, shows_pool=len(api.service.pools) > 1))

    async def worker(request: Request) -> Response:
        entry = await api.engine(_name(request))
        found = _info(entry, shows_pool=False)
        return JSONResponse({name: found[name] for name in ("url", "model_id", "is_healthy")})

    async def add(request: Request) -> Response:
        body = await body_of(request)
        await api.change(_adding(api.service, body))
        return JSONResponse(
            {"success": True, "message": f"Successfully added worker: {body['url']}"}
        )

    async def remove(request: Request) -> Response:
        query = query_of(request, ("at_once",))
        changed = await _removed(
            api, _name(request), at_once=flag_of(query, "at_once", usual=False)
        )
        message = f"Worker {_name(request)} removed successfully"
        if changed.engine is not None:
            message = f"Worker {_name(request)}: {changed.note}"
        return JSONResponse({"success": True, "message": message})

    async def urls(request: Request) -> Response:
        query_of(request, ())
        return JSONResponse(
            {"urls": [entry.url for entry in (await api.engines(pairs=False)).engines]}
        )

    async def add_url(request: Request) -> Response:
        query = query_of(request, ("url", "pool"))
        url = _url(query)
        await api.change(_adding(api.service, {"url": url}, query.get("pool")))
        return PlainTextResponse(f"Successfully added worker: {url}")

    async def remove_url(request: Request) -> Response:
        url = _url(query_of(request, ("url",)))
        changed = await _removed(api, url, at_once=False)
        return PlainTextResponse(f"Successfully removed worker: {url}: {changed.note}")

    for method, path, endpoint, failed, words in (
        ("GET", "/workers", workers, _as_json, "All engines"),
        ("POST", "/workers", add, _as_json, "Add an engine"),
        ("GET", "/workers/{name:path}", worker, _as_json, "One engine"),
        ("DELETE", "/workers/{name:path}", remove, _as_json, "Drain an engine, and remove it"),
        ("GET", "/list_workers", urls, _as_json, "The URLs of all engines"),
        ("POST", "/add_worker", add_url, _as_text, "Add an engine of role aggregated"),
        ("POST", "/remove_worker", remove_url, _as_text, "Drain an engine, and remove it"),
    ):
        app.add_api_route(
            path,
            _caught(endpoint, failed),
            methods=[method],
            summary=words,
            tags=["vllm-router"],
            response_model=None,
            name=f"{method.lower()}{path.partition('{')[0]}",
        )


def _caught(
    endpoint: Callable[[Request], Awaitable[Response]], failed: Callable[[PdproxyError], Response]
) -> Callable[[Request], Awaitable[Response]]:
    async def run(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (BadRequestError, NotThereError, ConflictError) as error:
            return failed(error)

    return run


async def _removed(api: AdminApi, name: str, *, at_once: bool) -> EngineChanged:
    _, changed = await api.change(Change("remove", name, at_once=at_once))
    assert isinstance(changed, EngineChanged)
    return changed


def _adding(service: AdminService, body: dict[str, Any], pool: str | None = None) -> Change:
    """Return the change that adds a worker. Raises BadRequestError if it is there, or the body is
    wrong.
    """
    for name in body:
        if name not in _KNOWN:
            raise BadRequestError(f"{quote(name)}: unknown key{did_you_mean(name, _KNOWN)}")
    url, kind = body.get("url"), body.get("worker_type") or "regular"
    if not isinstance(url, str):
        raise BadRequestError("url: missing: expected text")
    if not isinstance(kind, str) or kind not in ROLES:
        raise BadRequestError(f"worker_type: expected {' or '.join(ROLES)}")
    fields: dict[str, Any] = {"url": url, "role": ROLES[kind]}
    if body.get("labels"):
        fields["labels"] = body["labels"]
    if body.get("api_key") is not None:
        fields["api_key"] = body["api_key"]
    if (port := body.get("bootstrap_port")) is not None:
        fields["facts"] = {"bootstrap": _bootstrap(url, port)}
    if service.has(url):
        raise BadRequestError(f"Worker {url} already exists")
    if pool is None and len(service.pools) > 1:
        pool = _pool(service, body)
    return Change("add", "", fields if pool is None else {**fields, "pool": pool})


def _pool(service: AdminService, body: dict[str, Any]) -> str:
    """Return the name of the pool that a new engine comes into, where there are several."""
    labels, model = body.get("labels"), body.get("model_id")
    if isinstance(labels, dict) and "pool" in labels:
        if not isinstance(name := labels["pool"], str):
            raise BadRequestError("labels.pool: expected text")
        return service.pool(name, "labels.pool").name
    if isinstance(model, str) and len(found := service.serving(model)) == 1:
        return found[0]
    names = ", ".join(service.pools)
    raise BadRequestError(
        f"labels.pool: missing: there are several pools ({names}), and model_id is not what "
        f"exactly one of them serves"
    )


def _bootstrap(url: str, port: object) -> str:
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65_536:
        raise BadRequestError("bootstrap_port: expected a port")
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        host = ""  # which the check of the URL reports
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _listed(entries: list[EngineEntry], *, shows_pool: bool) -> dict[str, Any]:
    roles = [entry.role for entry in entries]
    stats = {
        "prefill_count": roles.count("prefill"),
        "decode_count": roles.count("decode"),
        "regular_count": len(roles) - roles.count("prefill") - roles.count("decode"),
    }
    return {
        "workers": [_info(entry, shows_pool=shows_pool) for entry in entries],
        "total": len(entries),
        "stats": stats,
    }


def _info(entry: EngineEntry, *, shows_pool: bool) -> dict[str, Any]:
    return {
        "url": entry.url,
        "model_id": entry.models[0] if entry.models else "unknown",
        "worker_type": _NAMES.get(entry.role, "regular"),
        "is_healthy": entry.health.state in ("up", "slow_start", "half_open"),
        "load": entry.load.requests,
        "connection_mode": "Http",
        "priority": 50,
        "cost": 1.0,
        "id": entry.id,
        "metadata": {**entry.labels, "pool": entry.pool} if shows_pool else entry.labels,
    }


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def _url(query: dict[str, str]) -> str:
    if "url" not in query:
        raise BadRequestError("expected ?url=http://host:port")
    return query["url"]


def _as_json(error: PdproxyError) -> Response:
    code = (
        "WORKER_NOT_FOUND"
        if error.status == 404
        else "CONFLICT"
        if error.status == 409
        else "ADD_WORKER_FAILED"
    )
    if "already exists" not in error.message and error.status == 400:
        code = "BAD_REQUEST"
    body = {"error": error.message, "code": code}
    if isinstance(error, ConflictError) and error.owner is not None:
        body["owner"] = error.owner
    return JSONResponse(body, error.status)


def _as_text(error: PdproxyError) -> Response:
    return PlainTextResponse(error.message, error.status)
