"""Operation: shutdown, certificate, data plane, processes, recording and log of the router."""

from __future__ import annotations

import ssl
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from router.config.checks import DAY_S, checked
from router.config.marks import TakenBy
from router.http.plane import DataPlane
from router.http.tls import read, server_context


class OperationSettings(BaseSettings):
    """Shutdown, TLS, data plane, recording and log; times in seconds."""

    drain_delay_s: Annotated[float, TakenBy.ENDING] = Field(
        default=0.0,
        ge=0,
        le=DAY_S,
        description="After SIGTERM, how long new requests are still taken while /health says 503: "
        "the time that a load balancer needs to notice.",
    )
    grace_s: Annotated[float, TakenBy.ENDING] = Field(
        default=30.0,
        ge=0,
        le=DAY_S,
        description="How long open answers may then go on; what is left gets an error.",
    )
    tls_cert: Annotated[str | None, TakenBy.CERTIFICATE] = Field(
        default=None,
        description="PEM file with the certificate and its chain: the port then speaks HTTPS.",
    )
    tls_key: Annotated[str | None, TakenBy.CERTIFICATE] = Field(
        default=None,
        validate_default=True,
        description="PEM file with its key, not encrypted; unset: it is in the same file.",
    )
    data_plane: DataPlane = Field(
        default=DataPlane.SPLICE,
        validate_default=True,
        description="How requests for answers of models pass through: from the client's connection "
        "to the engine's at once (splice), or by way of FastAPI like all others (asgi).",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that pass requests and answers on. With more than one, one more "
        "decides for all of them; one that fails is started again, and the others go on.",
    )
    record: str | None = Field(
        default=None,
        description="File for a recording of lengths and times, without text, as --trace and "
        "diagnose read it; .gz: compressed. Replaced at every start.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], TakenBy.LOG] = Field(
        default="info", description="Least severity that is logged: debug, info, warning, error."
    )
    log_format: Annotated[Literal["text", "json"], TakenBy.LOG] = Field(
        default="text", description="Lines of text for people, or of JSON."
    )

    @cached_property
    def certificate(self) -> tuple[bytes, bytes | None] | None:
        """Certificate and key as PEM, read once so that all uses of these settings agree.

        Raises:
            ConfigError: the files are unusable.
        """
        return None if self.tls_cert is None else read(self.tls_cert, self.tls_key)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """TLS context of the port; None: plain HTTP."""
        return None if self.certificate is None else server_context(*self.certificate)

    @field_validator("processes")
    @classmethod
    def _spliced_by_several(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("data_plane") is DataPlane.ASGI:
            raise ValueError("--processes above 1 needs --data-plane splice")
        return value

    @field_validator("tls_key")
    @classmethod
    def _usable_certificate(cls, value: str | None, info: ValidationInfo) -> str | None:
        cert = info.data.get("tls_cert")
        if cert is not None:
            checked(lambda key: read(cert, key), value)
        elif value is not None:
            raise ValueError("tls_key needs --tls-cert: the file with the certificate")
        return value
