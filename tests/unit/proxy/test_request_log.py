"""The line of a request in the log."""

from dataclasses import replace

from router.proxy.request_log import RequestLog, follow
from tests.support.core import request


def test_it_names_the_group_that_served_the_request() -> None:
    log, scope = RequestLog(lambda: 0.0), {"method": "POST", "path": "/v1/completions"}
    line, asked = log.begin(scope), request(0)
    follow(scope, asked, "llama", "mine")
    assert line.group == asked.group
    log.dispatched(replace(asked, group="west"))
    assert (line.group, line.attempts) == ("west", 1)
