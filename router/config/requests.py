"""Requests: model names, limits of each request, and extra answer headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from router.config.marks import TakenBy
from router.core.request_limits import DEFAULT_LIMITS, RequestLimits


class RequestSettings(BaseSettings):
    """How clients' requests are read."""

    model_alias: tuple[str, ...] = Field(
        default=(),
        description="A further name of a model, NAME=MODEL, may be repeated.",
    )

    worker_headers: Annotated[bool, TakenBy.RELAY] = Field(
        default=False,
        description="Whether answers say which worker they are from (x-evenstep-worker), and how "
        "many seconds their requests waited in the pool (x-evenstep-pool-wait-s).",
    )

    max_slots: int = Field(
        default=DEFAULT_LIMITS.max_slots,
        ge=1,
        le=65_536,
        description="Answers that one request may ask for, its prompts times n; more: 400.",
    )
    max_messages: int = Field(
        default=DEFAULT_LIMITS.max_messages,
        ge=1,
        le=65_536,
        description="Messages of a chat and parts of these, together; more are answered 400.",
    )

    @property
    def request_limits(self) -> RequestLimits:
        return RequestLimits(self.max_slots, self.max_messages)

    @property
    def aliases(self) -> Mapping[str, str]:
        return dict(_split(entry) for entry in self.model_alias)

    @field_validator("model_alias", mode="before")
    @classmethod
    def _split_aliases(cls, value: object) -> object:
        return tuple(value.split()) if isinstance(value, str) else value

    @field_validator("model_alias")
    @classmethod
    def _usable_aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        pairs = [_split(entry) for entry in value]
        names = [name for name, _ in pairs]
        for name, model in pairs:
            if not name or not model:
                raise ValueError(
                    f"model alias {'='.join((name, model))!r} should be NAME=MODEL, as in "
                    "chat=meta-llama/Llama-3.1-8B"
                )
            if names.count(name) > 1:
                raise ValueError(f"model alias {name!r} is given twice: leave one of them out")
            if model in names:
                raise ValueError(
                    f"model alias {name!r} leads to {model!r}, an alias too: name the model itself"
                )
        return value


def _split(entry: str) -> tuple[str, str]:
    name, _, model = entry.partition("=")
    return name, model
