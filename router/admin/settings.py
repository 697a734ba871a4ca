"""Reloadable settings over the admin port."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request

from router.admin.origin import audited, own_pages_only
from router.config.live import Reload
from router.core.errors import ConfigError, EvenstepError, InvalidRequestError

# These are changed elsewhere: in files, and at /workers.
_ELSEWHERE = ("workers", "tls_cert", "tls_key", "api_key_file", "admin_key_file")


def add_settings(app: FastAPI, reload: Reload) -> None:
    """Add ``/settings``."""
    routes = APIRouter(prefix="/settings", dependencies=[Depends(own_pages_only)])

    @routes.get("")
    async def settings() -> dict[str, Any]:
        """Those that can be changed, as they are."""
        return _shown(reload)

    @routes.patch("")
    async def change(request: Request) -> dict[str, Any]:
        """Some of them, as JSON; until the next start, or until their configuration is another."""
        values = _read(await request.body())
        try:
            with audited(request, f"change settings {values}"):
                for name in sorted(values.keys() & set(_ELSEWHERE)):
                    raise ConfigError(f"{name} cannot be changed here, but where it is read")
                await reload.change(values)
        except EvenstepError as error:
            raise InvalidRequestError(str(error)) from None
        return _shown(reload)

    app.include_router(routes)


def _shown(reload: Reload) -> dict[str, Any]:
    names = reload.names - set(_ELSEWHERE)
    return reload.settings.model_dump(mode="json", include=set(names))


def _read(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except ValueError as error:
        raise InvalidRequestError(f"not a JSON object of settings: {error}") from None
