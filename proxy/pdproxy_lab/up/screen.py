"""What `up` says: the plan before the start, and what to do once it serves. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.settings.schema import Settings
from pdproxy_lab.up import examples
from pdproxy_lab.up.prepared import Prepared
from pdproxy_lab.up.state import Folder


def url_of(settings: Settings) -> str:
    """Return where clients on this machine reach the proxy."""
    url = examples.url_of(settings.listen.host, settings.listen.port)
    has_tls = settings.listen.tls.certificate is not None
    return url.replace("http://", "https://", 1) if has_tls else url


def plan_lines(prepared: Prepared, folder: Folder) -> Iterator[str]:
    """Yield what will be started, and why."""
    plan = prepared.plan
    yield from plan.reasons
    wide = max(len(engine.name) for engine in plan.engines)
    for engine in plan.engines:
        on = f"GPU {', '.join(map(str, engine.gpus))}" if engine.gpus else "CPU"
        side = "" if engine.side_port is None else f"  side channel {engine.side_port}"
        yield (
            f"  {engine.name:{wide}}  {on}  http://127.0.0.1:{engine.port}{side}  "
            f"log {folder.log(engine.name)}"
        )
    yield f"  {'proxy':{wide}}  {url_of(prepared.settings)}  settings {folder.settings}"


def greeting(prepared: Prepared, seconds: float) -> Iterator[str]:
    """Yield how to use what serves now."""
    url = url_of(prepared.settings)
    yield f"serves after {seconds:.0f} s: {url}"
    yield "  " + examples.curl(url, prepared.plan.model.name)[0]
    admin = prepared.settings.listen.admin or ""
    if admin.startswith("unix:"):
        yield f"  pdproxy engines list --watch --admin {admin}"
        yield "  the page: start with --admin 127.0.0.1:9000, then http://127.0.0.1:9000"
    else:
        yield f"  the page: http://{admin}"
    yield "Ctrl-C ends the proxy and its engines."
