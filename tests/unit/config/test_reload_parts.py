"""Settings that are read again: what cannot be had now is asked for at the next reading."""

from collections.abc import Sequence

import pytest

from router.config.live import Part, Reload
from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.logs import start_logging


async def test_what_was_refused_is_taken_when_it_is_read_again() -> None:
    asked: list[int] = []

    def take(settings: ServeSettings) -> None:
        asked.append(settings.pool_size)
        if len(asked) == 1:
            raise ConfigError("not now")

    part = Part(take)
    reload = Reload(ServeSettings(), lambda: ServeSettings(pool_size=7), [part])
    await reload()
    assert reload.settings == ServeSettings()
    await reload()
    assert (asked, reload.settings.pool_size) == ([7, 7], 7)


async def test_what_one_part_refuses_no_part_takes() -> None:
    taken: list[int] = []

    def refuse(_: ServeSettings) -> None:
        raise ConfigError("not this")

    parts = [
        Part(lambda settings: taken.append(settings.pool_size)),
        Part(lambda _: None, refuse),
    ]
    reload = Reload(ServeSettings(), lambda: ServeSettings(pool_size=7, policy="jsq"), parts)
    await reload()
    assert (taken, reload.settings) == ([], ServeSettings())


async def test_what_is_as_it_was_at_the_start_takes_effect_now(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ports = iter((8001, 8000))
    reload = Reload(ServeSettings(), lambda: ServeSettings(port=next(ports)), [])
    await reload()
    assert "take effect at the next start: port" in capsys.readouterr().err
    await reload()
    assert "next start" not in capsys.readouterr().err


class Others:
    """Other processes, one of which may refuse, or not follow."""

    def __init__(self, refusal: str = "", late: Sequence[str] = ()) -> None:
        self.refusal, self.late = refusal, late

    async def agree(self, settings: ServeSettings) -> None:
        if self.refusal:
            raise ConfigError(self.refusal)

    async def follow(self) -> list[str]:
        return list(self.late)


async def test_what_a_part_refuses_once_the_others_have_agreed_no_part_takes() -> None:
    taken: list[int] = []
    refused: list[str] = []

    def check(_: ServeSettings) -> None:
        if refused:
            raise ConfigError(refused[0])

    class Slow(Others):
        async def agree(self, settings: ServeSettings) -> None:
            refused.append("a worker has come meanwhile")

    first = Part(lambda settings: taken.append(settings.pool_size))
    second = Part(lambda _: None, check)
    reload = Reload(ServeSettings(), lambda: ServeSettings(pool_size=7), [first, second])
    reload.followers = Slow()
    await reload()
    assert (taken, reload.settings) == ([], ServeSettings())


async def test_what_another_process_refuses_this_one_does_not_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_logging("info", "text")
    taken: list[int] = []
    part = Part(lambda settings: taken.append(settings.pool_size))
    reload = Reload(ServeSettings(), lambda: ServeSettings(pool_size=7), [part])
    reload.followers = Others("proxy 1: not this")
    await reload()
    with pytest.raises(ConfigError, match="proxy 1: not this"):
        await reload.change({"pool_size": 8})
    assert (taken, reload.settings) == ([], ServeSettings())

    reload.followers = Others(late=["proxy 1"])
    await reload()
    said = capsys.readouterr().err
    assert "the settings stay as they are: proxy 1: not this" in said
    assert (
        "ERROR router.config.live: settings read again; changed: pool_size; not yet in proxy 1"
        in said
    )
    assert taken == [7]
