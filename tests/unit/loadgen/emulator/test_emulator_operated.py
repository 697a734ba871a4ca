"""What an emulated engine's operator may have it do."""

import pytest

from loadgen.emulator.generation import Limits, RejectedError
from loadgen.emulator.operated import Operated


def test_answers_begin_again_when_it_neither_sleeps_nor_is_paused() -> None:
    engine = Operated()
    for path in ("/sleep", "/pause", "/wake_up"):
        engine.do(path, b"")
    assert not engine.going.is_set()
    assert engine.said("is_sleeping") == b'{"is_sleeping":false}'
    assert engine.said("is_paused") == b'{"is_paused":true}'
    engine.do("/resume", b"")
    assert engine.going.is_set()


def test_adapters_are_served_beside_the_model() -> None:
    engine = Operated()
    engine.do("/v1/load_lora_adapter", b'{"lora_name": "sql", "lora_path": "/sql"}')
    assert engine.adapters == {"sql": "/sql"}
    limits = Limits("tiny", 100, 0, frozenset(engine.adapters))
    for model in ("tiny", "sql", None):
        limits.check(model)
    with pytest.raises(RejectedError, match="`other` does not exist"):
        limits.check("other")


@pytest.mark.parametrize(("body", "status"), [(b"{}", 400), (b'{"lora_name": "sql"}', 404)])
def test_what_is_not_there_cannot_be_unloaded(body: bytes, status: int) -> None:
    with pytest.raises(RejectedError) as caught:
        Operated().do("/v1/unload_lora_adapter", body)
    assert caught.value.status == status
