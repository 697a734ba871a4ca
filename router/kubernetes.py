"""A small client of the Kubernetes API: objects are read, written and followed."""

import asyncio
import json
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from router.core.errors import ConfigError, EvenstepError

log = logging.getLogger(__name__)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_GONE = 410
_TIMEOUT_S = 10.0
# The server ends a watch after it: a silent connection is never trusted for longer.
_WATCH_S = 60
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 10.0

Object = dict[str, Any]


class KubernetesError(EvenstepError):
    """The API refuses, or cannot be reached (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"Kubernetes API: {message}")
        self.status = status


class Kubernetes:
    """``url``: of the API, as ``kubectl proxy`` prints it; None: the cluster of this pod.

    Raises:
        ConfigError: this is no pod.
    """

    def __init__(
        self, url: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._token: Path | None = None
        verify: ssl.SSLContext | bool = True
        if url is None:
            host, port = (os.environ.get(f"KUBERNETES_SERVICE_{i}", "") for i in ("HOST", "PORT"))
            if not host:
                raise ConfigError("no Kubernetes API: this is no pod; give --kubernetes-api URL")
            url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
            self._token = _ACCOUNT / "token"
            verify = ssl.create_default_context(cafile=_ACCOUNT / "ca.crt")
        self._client = httpx.AsyncClient(
            base_url=url, verify=verify, timeout=_TIMEOUT_S, trust_env=False, transport=transport
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def ask(self, method: str, path: str, body: object = None, **query: object) -> Any:
        """The answer's object; KubernetesError: none, or a refusal."""
        try:
            answer = await self._client.send(self._request(method, path, body, query))
        except httpx.HTTPError as error:
            raise KubernetesError(0, str(error) or type(error).__name__) from None
        if not answer.is_success:
            raise KubernetesError(answer.status_code, f"{method} {path}: {_told(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise KubernetesError(0, f"{method} {path}: {error}") from None

    async def follow(self, path: str, **query: object) -> AsyncIterator[Sequence[Object]]:
        """All objects of a collection, at first and after each change, for ever.

        While the API is gone, nothing changes. It closes the client in the end.
        """
        try:
            async for objects in self._follow(path, query):
                yield objects
        finally:
            await self.aclose()

    async def _follow(self, path: str, query: dict[str, object]) -> AsyncIterator[Sequence[Object]]:
        objects: dict[str, Object] = {}
        version, delay_s = "", _FIRST_DELAY_S
        while True:
            try:
                if not version:
                    listed = await self.ask("GET", path, **query)
                    version = listed["metadata"]["resourceVersion"]
                    objects = {each["metadata"]["name"]: each for each in listed["items"] or ()}
                    yield list(objects.values())
                async for kind, each in self._watch(path, version, query):
                    version, delay_s = each["metadata"]["resourceVersion"], _FIRST_DELAY_S
                    if kind == "BOOKMARK":
                        continue
                    objects[each["metadata"]["name"]] = each
                    if kind == "DELETED":
                        del objects[each["metadata"]["name"]]
                    yield list(objects.values())
                # A watch that ends at once must not be asked again without end.
                await asyncio.sleep(_FIRST_DELAY_S)
            except (KubernetesError, KeyError, TypeError, OSError) as error:
                # The last three: an answer of another form; a token that cannot be read.
                if isinstance(error, KubernetesError) and error.status == _GONE:
                    version = ""  # the server no longer knows what has changed since
                else:
                    log.warning("%s; what is known of %s stays", error, path)
                await asyncio.sleep(delay_s * random.uniform(0.5, 1))
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    async def _watch(
        self, path: str, version: str, query: dict[str, object]
    ) -> AsyncIterator[tuple[str, Object]]:
        watching = {"watch": 1, "resourceVersion": version, "timeoutSeconds": _WATCH_S}
        asked = {**query, **watching, "allowWatchBookmarks": "true"}
        request = self._request("GET", path, None, asked, _WATCH_S + _TIMEOUT_S)
        try:
            answer = await self._client.send(request, stream=True)
            try:
                if not answer.is_success:
                    await answer.aread()
                    raise KubernetesError(answer.status_code, f"watch {path}: {_told(answer)}")
                async for line in answer.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise KubernetesError(status.get("code", 0), status.get("message", ""))
                    yield event["type"], event["object"]
            finally:
                await answer.aclose()
        except (httpx.HTTPError, ValueError) as error:
            raise KubernetesError(0, str(error) or type(error).__name__) from None

    def _request(
        self,
        method: str,
        path: str,
        body: object,
        query: dict[str, object],
        read_s: float = _TIMEOUT_S,
    ) -> httpx.Request:
        headers = {}
        if self._token is not None:  # it changes every hour or so
            headers["authorization"] = f"Bearer {self._token.read_text().strip()}"
        params: dict[str, Any] = dict(query)
        timeout = httpx.Timeout(_TIMEOUT_S, read=read_s)
        return self._client.build_request(
            method, path, params=params, headers=headers, json=body, timeout=timeout
        )


def _told(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
