"""The log: to stderr, as text for people or as lines of JSON; what has fields shows them.

A message may come with fields, ``log.info("…", extra=fields(status=200))``: JSON has them as such,
text as ``name=value`` behind the message.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

_FIELDS = "evenstep_fields"
_PLAIN = re.compile(r"[\w.:/@+~*#-]+", re.ASCII)


def start_logging(level: str, form: str = "text") -> None:
    """Log to stderr from this severity on; may be called again.

    Args:
        level: debug, info, warning, error.
        form: text or json.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # What it says of a server's start and end the router says itself.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def fields(**values: object) -> dict[str, object]:
    """Fields of a message, for ``extra``; those that are None stay out."""
    return {_FIELDS: {name: value for name, value in values.items() if value is not None}}


class TextLines(logging.Formatter):
    """``2026-01-31 12:00:00,000 INFO router.server: message name=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging has it
        """See ``logging``."""
        shown = (f"{name}={_text(value)}" for name, value in _fields(record).items())
        return visible(" ".join((super().formatMessage(record), *shown)))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as logging has it
        """See ``logging``; indented, so that no line of it looks like one of the log's own."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {visible(line)}" for line in lines)


class JsonLines(logging.Formatter):
    """One object per line: time, level, logger, message, the fields, and the exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging``."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return visible(msgspec.json.encode(line, enc_hook=str).decode())


def visible(text: str) -> str:
    """The same with all that is not to be seen, or turns the direction, escaped as in JSON.

    Line ends of every kind are among it, so that what comes from outside makes no line of its own.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record.__dict__.get(_FIELDS, {})
    return found


def _text(value: object) -> str:
    """A value on a line of its own kind: what could be mistaken is quoted as in JSON."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else msgspec.json.encode(text).decode()
