"""Lines of the log, as text and as JSON."""

from __future__ import annotations

import json
import logging

from router.logs import JsonLines, TextLines, fields


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("router.test")
    return logger.makeRecord(
        logger.name, logging.WARNING, "file", 1, message, arguments, None, extra=extra
    )


def test_fields_follow_the_message_and_cannot_be_mistaken() -> None:
    told = fields(status=200, worker="http://a:1#0", path="/a b\nstatus=500", key=None, empty="")
    line = TextLines().format(record("%s ended", "request", **told))

    assert line.partition(" WARNING ")[2] == (
        "router.test: request ended status=200 worker=http://a:1#0 "
        r'path="/a b\nstatus=500" empty=""'
    )


def test_json_has_one_object_a_line() -> None:
    told = fields(status=200, path="/a\nb", times=(1, 2.5), kind=ValueError)
    line = JsonLines().format(record("%s ended", "request", **told))

    assert "\n" not in line
    shown = json.loads(line)
    assert shown.pop("time").endswith("+00:00")
    assert shown == {
        "level": "warning",
        "logger": "router.test",
        "message": "request ended",
        "status": 200,
        "path": "/a\nb",
        "times": [1, 2.5],
        "kind": "<class 'ValueError'>",
    }


def test_json_has_exceptions_as_a_field() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        broken = record("it broke")
        broken.exc_info = (type(error), error, error.__traceback__)

    assert json.loads(JsonLines().format(broken))["exception"].endswith("ValueError: broken")
