"""Lines of the log, as text and as JSON."""

import json
import logging

from router.logs import JsonLines, TextLines, fields, visible


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


HOSTILE = "a\n2026-01-01 ERROR\r\x1b[2J\x85\u2028\u2029\u200e\u202e\u2066\ufeff\U000e0041b"
SHOWN = r"a\n2026-01-01 ERROR\r\u001b[2J\u0085\u2028\u2029\u200e\u202e\u2066\ufeff\udb40\udc41b"


def test_nothing_from_outside_hides_or_makes_a_line() -> None:
    hostile = record("%s is down", HOSTILE, **fields(worker=HOSTILE))

    line = TextLines().format(hostile)
    assert line.isprintable()
    assert line.partition(" WARNING ")[2] == f'router.test: {SHOWN} is down worker="{SHOWN}"'

    line = JsonLines().format(hostile)
    assert line.isprintable()
    shown = json.loads(line)
    assert (shown["message"], shown["worker"]) == (f"{HOSTILE} is down", HOSTILE)


def test_a_traceback_has_no_line_that_looks_like_one_of_the_log() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        broken = record("it broke")
        broken.exc_info = (type(error), error, error.__traceback__)

    first, *others = TextLines().format(broken).split("\n")
    assert first.endswith("router.test: it broke")
    assert len(others) > 2
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_what_can_be_seen_stays_as_it_is() -> None:
    assert visible("größe 模型 é \\n") == "größe 模型 é \\n"
