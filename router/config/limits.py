"""Limits: size and time limits of clients' requests; times in seconds."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from router.config.checks import DAY_S, MOMENT_S
from router.http.limits import HttpLimits

_DEFAULTS = HttpLimits()


class LimitSettings(BaseSettings):
    """Sizes and times of clients' requests; times in seconds."""

    max_connections: int = Field(
        default=_DEFAULTS.max_connections,
        ge=1,
        le=1_000_000,
        description="Open connections of clients; one more is answered 503 and closed.",
    )
    max_uri_bytes: int = Field(
        default=_DEFAULTS.max_uri_bytes,
        ge=256,
        le=1_048_576,
        description="Longest path with query; a longer one is answered 414.",
    )
    max_header_bytes: int = Field(
        default=_DEFAULTS.max_header_bytes,
        ge=1024,
        le=1_048_576,
        description="Longest request line with header fields; longer ones are answered 431.",
    )
    max_headers: int = Field(
        default=_DEFAULTS.max_headers,
        ge=8,
        le=10_000,
        description="Header fields of a request; more are answered 431.",
    )
    max_body_bytes: int = Field(
        default=_DEFAULTS.max_body_bytes,
        ge=1024,
        le=2**30,
        description="Longest body of a request; a longer one is answered 413.",
    )
    max_bodies_bytes: int = Field(
        default=_DEFAULTS.max_bodies_bytes,
        ge=1024,
        le=2**40,
        description="Bytes of the bodies of all open requests together; more are answered 503.",
    )
    header_timeout_s: float = Field(
        default=_DEFAULTS.header_timeout_s,
        ge=MOMENT_S,
        le=DAY_S,
        description="Longest wait for the end of a request's header fields; then 408.",
    )
    body_timeout_s: float = Field(
        default=_DEFAULTS.body_timeout_s,
        ge=MOMENT_S,
        le=DAY_S,
        description="Longest wait for the end of a request's body; then 408.",
    )
    keep_alive_timeout_s: float = Field(
        default=_DEFAULTS.keep_alive_timeout_s,
        ge=MOMENT_S,
        le=DAY_S,
        description="How long a connection stays open between two requests.",
    )
    write_timeout_s: float = Field(
        default=_DEFAULTS.write_timeout_s,
        ge=MOMENT_S,
        le=DAY_S,
        description="Longest wait for a client that does not read its answer.",
    )

    @property
    def http_limits(self) -> HttpLimits:
        return HttpLimits(
            self.max_connections,
            self.max_uri_bytes,
            self.max_header_bytes,
            self.max_headers,
            self.max_body_bytes,
            max(self.max_bodies_bytes, self.max_body_bytes),
            self.header_timeout_s,
            self.body_timeout_s,
            self.keep_alive_timeout_s,
            self.write_timeout_s,
        )
