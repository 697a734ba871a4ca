"""Classes of requests with targets of their own."""

import pytest

from loadgen.traces.request_classes import RequestClass, deal, parse_classes
from router.core.errors import ConfigError
from router.core.targets import Targets

THREE = "chat:0.5:1:0.04,agents:0.3:3,fast:0.1::0.02,batch:0.1"


def test_classes_are_told_as_they_were_given() -> None:
    classes = parse_classes(THREE)
    assert classes == (
        RequestClass("chat", 0.5, Targets(1.0, 0.04)),
        RequestClass("agents", 0.3, Targets(3.0)),
        RequestClass("fast", 0.1, Targets(None, 0.02)),
        RequestClass("batch", 0.1),
    )
    assert ",".join(map(str, classes)) == THREE
    assert parse_classes(THREE.replace(",", ", ")) == classes


@pytest.mark.parametrize(
    "text",
    [
        *("", "chat", "chat:", ":1", "chat:x", "chat:0,batch:1", "chat:1:0", "chat:1:x"),
        *("chat:1:1:1:1", "chat:.5,chat:.5", "chat:.5,batch:.4", "chat:2", "chat:nan"),
    ],
)
def test_other_forms_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="--classes"):
        parse_classes(text)


def test_requests_are_dealt_by_share_and_seed() -> None:
    classes = parse_classes(THREE)
    dealt = deal(classes, 10_000, 1)
    assert dealt == deal(classes, 10_000, 1) != deal(classes, 10_000, 2)
    for each in classes:
        assert dealt.count(each) / 10_000 == pytest.approx(each.share, abs=0.02)
    assert [each.targets for each in deal((), 2, 1)] == [None, None]
