"""Access: keys of clients, engines and operators."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from router.access.files import check_keys, read_key
from router.config.checks import checked
from router.config.marks import TakenBy


class AccessSettings(BaseSettings):
    """Files with keys."""

    api_key_file: Annotated[str | None, TakenBy.KEYS] = Field(
        default=None,
        description="File with the clients' API keys, a line each: NAME KEY [weight=W] "
        "[concurrency=N] [rate=N/s]; EVENSTEP_API_KEYS may hold more, with ; between them. Unset: "
        "anybody may ask.",
    )
    worker_api_key_file: str | None = Field(
        default=None,
        description="File with the engines' own API key (vLLM's --api-key), which they are sent.",
    )
    admin_key_file: Annotated[str | None, TakenBy.KEYS] = Field(
        default=None,
        description="File with keys that open the admin port, a line each: NAME KEY; it may then "
        "listen on any address.",
    )

    @field_validator("api_key_file", "admin_key_file")
    @classmethod
    def _usable_key_files(cls, value: str | None) -> str | None:
        return None if value is None else checked(check_keys, value)

    @field_validator("worker_api_key_file")
    @classmethod
    def _usable_worker_key(cls, value: str | None) -> str | None:
        if value is not None:
            checked(read_key, value)
        return value

    @property
    def worker_key(self) -> str | None:
        return None if self.worker_api_key_file is None else read_key(self.worker_api_key_file)
