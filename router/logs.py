"""The log on stderr, as text or as JSON lines, with fields.

A message may carry fields: ``log.info("…", extra=fields(status=200))``. JSON shows them as members,
text as ``name=value`` after the message.
"""

import json
import logging
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from router.core.errors import ConfigError, EvenstepError, InputError

_FIELDS = "evenstep_fields"
_PLAIN = re.compile(r"[\w.:/@+~*#-]+", re.ASCII)


def start_logging(level: str, form: str = "text") -> None:
    """Configure logging to stderr; may be called again.

    Args:
        level: lowest severity shown: debug, info, warning or error.
        form: text or json.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No line shows thread or process, and each costs a look-up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # The router logs a server's start and end itself.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def fields(**values: object) -> dict[str, object]:
    """Fields of a message, for ``extra``; None values are omitted."""
    return {_FIELDS: {name: value for name, value in values.items() if value is not None}}


class TextLines(logging.Formatter):
    """``2026-01-31 12:00:00,000 INFO router.serve.router: message name=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s")  # whether the time is wanted
        self._second, self._time = -1, ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging has it
        line = f"{record.asctime} {record.levelname} {record.name}: {record.message}"
        for name, value in record.__dict__.get(_FIELDS, {}).items():
            text = str(value)
            # Quoted if it could be misread; numbers cannot.
            if not isinstance(value, int | float) and not _PLAIN.fullmatch(text):
                text = msgspec.json.encode(text).decode()
            line += f" {name}={text}"
        return visible(line)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        second = int(record.created)
        if second != self._second:
            self._second, self._time = (
                second,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second)),
            )
        return f"{self._time},{int(record.msecs):03}"

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as logging has it
        """Indent the traceback, so that none of its lines looks like a log line."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {visible(line)}" for line in lines)


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, fields, and the exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **record.__dict__.get(_FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return visible(msgspec.json.encode(line, enc_hook=str).decode())


def visible(text: str) -> str:
    """Escape invisible and direction-changing characters as in JSON.

    So with line ends of every kind: outside input cannot forge a log line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def report_errors(run: Callable[[], object]) -> None:
    """Run a command; errors go on one line; exit 2 on bad input, else 1."""
    try:
        run()
    except EvenstepError as error:
        from rich.console import Console  # slow to import, and few processes need it
        from rich.text import Text

        line = " ".join(str(error).split())
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)
        raise SystemExit(2 if isinstance(error, ConfigError | InputError) else 1) from None
