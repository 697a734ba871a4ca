"""Decorator for hooks whose errors must never reach the engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

log = logging.getLogger("vllm.evenstep")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def harmless(consequence: str) -> Callable[[_Method], _Method]:
    """Log an exception and its consequence; then the object has ``failed``, and does no more."""

    def guard(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **named: Any) -> Any:
            if self.failed:
                return None
            try:
                return method(self, *args, **named)
            except Exception:
                self.failed = True
                log.exception("evenstep: %s", consequence)
                return None

        return cast(_Method, guarded)

    return guard
