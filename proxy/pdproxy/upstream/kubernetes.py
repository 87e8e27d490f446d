"""Asks the API server of a Kubernetes cluster, and has it change objects. By lightkube: it reads
kubeconfig files and the service account of a pod, and knows their certificates, tokens and plugins.

Owns the deadline of an answer, and bounds of what is sent. How a collection is followed:
`fleet.informer`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import yaml

from pdproxy.kit.errors import Wait
from pdproxy.kit.regular_file import UnusableFileError, read_regular
from pdproxy.kit.text import truncate
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.wire.kubernetes import Status

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response
    from lightkube.config.kubeconfig import KubeConfig, SingleConfig

MAX_ANSWER = 64 << 20
"""Bytes of one answer that is read whole. 500 pods have 4 MB."""
MAX_LINE = 8 << 20
"""Bytes of one event of a watch. The API server stores objects of 1.5 MB at most."""
MAX_STATUS = 64 << 10
"""Bytes of an answer that says what is wrong."""
MAX_FILE = 1 << 20
"""Bytes of a kubeconfig file, and of a token."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding an answer raises that can't be read."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the credentials of its service account."""
USUAL_FILE = "~/.kube/config"
_RUN_PLUGIN = (
    "import subprocess as s, sys\n"
    "try: done = s.run(sys.argv[2:], stdin=s.DEVNULL, timeout=float(sys.argv[1])).returncode\n"
    "except (OSError, s.SubprocessError) as error: done = str(error)\n"
    "sys.exit(done)"
)
"""A program that runs a plugin for some seconds at most."""
_EXEC_VERSION = "client.authentication.k8s.io/v1"
_NAMESPACE = "default"
Parameters = Mapping[str, str]


class ApiError(Exception):
    """The API server could not be asked, or it refuses. `str()` says why, in a few words.

    `status`: of HTTP, None if there was none. `message`: what the server says itself. `passed`: the
    deadline that has ended the wait. `pause`: seconds for which the server wants to be left alone.
    """

    def __init__(
        self,
        why: str,
        *,
        status: int | None = None,
        message: str = "",
        passed: Wait | None = None,
        pause: float = 0.0,
    ) -> None:
        super().__init__(truncate(why))
        self.status = status
        self.message = message
        self.passed = passed
        self.pause = pause


class ConnectionCutError(ApiError):
    """The connection has ended in the middle of an answer."""


class _Access(NamedTuple):
    """Where the API server is, and who asks. `server_name`: in its certificate, None: the host of
    its URL. `proxy`: the URL of a proxy, None: as the environment says.
    """

    config: SingleConfig
    server_name: str | None = None
    proxy: str | None = None


class KubernetesApi:
    """The API server that the settings name.

    Raises:
        SettingsError: lightkube is not installed, or nothing says where the server is.
    """

    def __init__(self, section: Kubernetes) -> None:
        if find_spec("lightkube") is None:
            raise SettingsError("pods as engines need lightkube: pip install 'pdproxy[kubernetes]'")
        self._section = section
        try:
            config = self._access().config
        except ApiError as error:
            raise SettingsError(str(error)) from None
        self.namespace: str = config.context.namespace or _NAMESPACE
        """The proxy's own, or that of the context."""
        self.url: str = config.cluster.server

    def __repr__(self) -> str:
        return f"<KubernetesApi {self.url}>"

    def connection(self) -> ApiConnection:
        """Return a connection of its own to the server. None is made yet."""
        return ApiConnection(self._client, self.url, self._section.timeout)

    def _client(self) -> tuple[AsyncClient, Mapping[str, str]]:
        """Return a client with the credentials as they are now, and more for each request."""
        # Imported here: only the process that follows pods needs the library.
        import httpx2
        from lightkube.config.client_adapter import AsyncClient, ConnectionParams

        access = self._access()
        none = httpx2.Timeout(None)  # deadlines are ours
        try:
            client = AsyncClient(access.config, ConnectionParams(timeout=none, proxy=access.proxy))
        except _WRONG as error:
            raise ApiError(f"{self._name}: {_text(error)}") from None
        return client, {} if access.server_name is None else {"sni_hostname": access.server_name}

    @property
    def _name(self) -> str:
        return f"kubeconfig {truncate(path)}" if (path := self._path()) else "the service account"

    def _path(self) -> str | None:
        """Return the kubeconfig file, None: the service account of the pod counts."""
        if (path := self._section.kubeconfig) is not None:
            return path
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            return None
        return os.environ.get("KUBECONFIG") or str(Path(USUAL_FILE).expanduser())

    def _access(self) -> _Access:
        """Read who asks, and where. Raises ApiError."""
        from lightkube.config.kubeconfig import KubeConfig
        from lightkube.core.exceptions import ConfigError

        path = self._path()
        try:
            if path is None:
                return _Access(_in_use(KubeConfig.from_service_account(ACCOUNT)))
            return _of_file(path, self._section.context, self._section.timeout)
        except UnusableFileError as error:
            raise ApiError(f"{self._name} {error}") from None
        except (ConfigError, *_WRONG) as error:
            raise ApiError(f"{self._name}: {_text(error)}") from None


_WRONG = (
    *(AssertionError, AttributeError, KeyError, OSError, TypeError, ValueError),
    *(msgspec.MsgspecError, yaml.YAMLError),
)
"""What lightkube raises for credentials that it can't read, besides its own exception."""


def _text(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"has no {error}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1} is no YAML"  # its text quotes the file
    return str(error) or type(error).__name__


def _of_file(path: str, context: str | None, seconds: float) -> _Access:
    """Read a kubeconfig file. `context`: None: its current one. `seconds`: for a plugin."""
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.config.models import User

    content = yaml.safe_load(read_regular(path, MAX_FILE))
    if not isinstance(content, dict):
        raise ValueError("is no kubeconfig file")  # noqa: TRY004 - of a file, not of an argument
    _adapt_plugins(content, seconds)
    config = _in_use(KubeConfig.from_dict(content, fname=path), context)
    user = config.user or User()
    if user.token_file is not None:
        user.token_file = str(config.abs_file(user.token_file))
    # What lightkube does not read.
    cluster = next(
        one["cluster"] for one in content["clusters"] if one["name"] == config.context.cluster
    )
    return _Access(
        config._replace(user=user), cluster.get("tls-server-name"), cluster.get("proxy-url")
    )


def _in_use(configs: KubeConfig, context: str | None = None) -> SingleConfig:
    found = configs.get(context)
    assert found is not None  # without a default it raises
    return found


def _adapt_plugins(content: dict[str, Any], seconds: float) -> None:
    """Have plugins of the API's version 1, too: lightkube knows the version before, which differs
    in nothing that it uses. They are told which version to answer in.

    A plugin that hangs is killed, which lightkube does not do, and none can ask at a terminal.
    """
    for one in content.get("users") or ():
        plugin = (one.get("user") or {}).get("exec")
        if not plugin:
            continue
        said = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential"}
        said["spec"] = {"interactive": False}
        told = {"name": "KUBERNETES_EXEC_INFO", "value": json.dumps(said)}
        plugin["env"] = [*(plugin.get("env") or ()), told]
        if plugin.get("apiVersion") == _EXEC_VERSION:
            plugin["apiVersion"] = f"{_EXEC_VERSION}beta1"
        run = ["-c", _RUN_PLUGIN, str(seconds), str(plugin.get("command"))]
        plugin["args"] = [*run, *(plugin.get("args") or ())]
        plugin["command"] = sys.executable


class ApiConnection:
    """Asks for one thing at a time. `make`: returns a new client, and more for each request."""

    def __init__(
        self, make: Callable[[], tuple[AsyncClient, Mapping[str, str]]], url: str, timeout: float
    ) -> None:
        self._make = make
        self._url = url
        self._timeout = timeout
        self._made: tuple[AsyncClient, Mapping[str, str]] | None = None

    def __repr__(self) -> str:
        return f"<ApiConnection {self._url}>"

    async def drop(self) -> None:
        """Close it. With the next request credentials and certificates are read again."""
        made, self._made = self._made, None
        if made is not None:
            await made[0].aclose()

    async def get(self, path: str, parameters: Parameters) -> bytes:
        """Return the body of an answer. Raises ApiError."""
        async with self._deadline(), self._answer("GET", path, parameters) as answer:
            return await _body(answer, MAX_ANSWER)

    async def send(
        self,
        method: str,
        path: str,
        parameters: Parameters,
        body: bytes,
        content_type: str = "application/json",
    ) -> bytes:
        """Have something changed, and return the body of the answer. Raises ApiError: then it may
        have been changed all the same.
        """
        sent = content_type, body
        async with self._deadline(), self._answer(method, path, parameters, sent) as answer:
            return await _body(answer, MAX_ANSWER)

    @asynccontextmanager
    async def watch(
        self, path: str, parameters: Parameters
    ) -> AsyncIterator[AsyncGenerator[list[bytes], None]]:
        """Yield the lines of an answer as they come. Only its beginning has a deadline.

        Raises:
            ApiError: it can't be had; or, of what is yielded, that can't be read.
        """
        async with self._deadline() as deadline, self._answer("GET", path, parameters) as answer:
            deadline.reschedule(None)
            async with aclosing(_lines(answer)) as lines:
                yield lines

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[asyncio.Timeout]:
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                yield deadline
        except TimeoutError:
            if not deadline.expired():
                raise
            why = f"{self._url}: no answer in {self._timeout:g} s"
            raise ApiError(why, passed=Wait.KUBERNETES) from None

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        parameters: Parameters,
        sent: tuple[str, bytes] | None = None,
    ) -> AsyncIterator[Response]:
        """Ask. `sent`: the type of a body, and the body."""
        from httpx2 import HTTPError, InvalidURL
        from lightkube.core.exceptions import ConfigError

        if self._made is None:
            self._made = self._make()
        client, extensions = self._made
        # bounds hold for what is read, and compressed bodies may become any size
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        if sent is not None:
            headers["content-type"] = sent[0]
        try:
            request = client.build_request(
                method,
                path,
                params=parameters,
                content=None if sent is None else sent[1],
                headers=headers,
                extensions=dict(extensions),
            )
            answer = await client.send(request, stream=True)
        except (HTTPError, InvalidURL) as error:
            raise ApiError(f"{self._url}: {_text(error)}") from None
        except (ConfigError, *_WRONG) as error:
            raise ApiError(f"{self._url}: no credentials: {_text(error)}") from None
        try:
            if not 200 <= answer.status_code < 300:
                raise await _refused(answer)
            yield answer
        finally:
            await answer.aclose()


async def _parts(answer: Response) -> AsyncGenerator[bytes, None]:
    from httpx2 import HTTPError

    try:
        async with aclosing(answer.aiter_raw()) as parts:
            async for part in parts:
                yield part
    except HTTPError as error:
        raise ConnectionCutError(f"the connection ended in an answer: {_text(error)}") from None


async def _body(answer: Response, most: int) -> bytes:
    found = bytearray()
    async with aclosing(_parts(answer)) as parts:
        async for part in parts:
            found += part
            if len(found) > most:
                raise ApiError(f"an answer of more than {most} bytes")
    return bytes(found)


async def _lines(answer: Response) -> AsyncGenerator[list[bytes], None]:
    rest = b""
    async with aclosing(_parts(answer)) as parts:
        async for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > MAX_LINE:
                raise ApiError(f"an event of more than {MAX_LINE} bytes")
            if lines:
                yield lines


async def _refused(answer: Response) -> ApiError:
    """Return what an answer with an error says."""
    status = Status()
    with suppress(ApiError, *UNREADABLE):  # a server before the API's may say anything
        status = msgspec.json.decode(await _body(answer, MAX_STATUS), type=Status)
    after = answer.headers.get("retry-after", "")
    why = f"the API server answers {answer.status_code}"
    return ApiError(
        f"{why}: {status.message}" if status.message else why,
        status=answer.status_code,
        message=status.message,
        pause=float(after) if after.isdecimal() and len(after) < 5 else 0.0,
    )
