"""Settings that are read again: what cannot be had now is asked for at the next reading."""

import pytest

from router.config.live import Part, Reload
from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError


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
