"""Every number that can be set has a range, which whoever leaves it is told."""

import typing

import pytest

from router.config.serve_settings import ServeSettings
from router.config.setting_sources import load_settings
from router.config.worker_notation import parse_worker
from router.core.errors import ConfigError

NUMBERS = [
    name
    for name, field in ServeSettings.model_fields.items()
    if {int, float} & {field.annotation, *typing.get_args(field.annotation)}
    and name != "power_levels"
]


def bounds(name: str) -> tuple[float, float]:
    found = {type(b).__name__: b for b in ServeSettings.model_fields[name].metadata}
    return found["Ge"].ge, found["Le"].le


def test_there_are_numbers() -> None:
    assert len(NUMBERS) > 45


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_a_range_and_may_be_at_its_ends(name: str) -> None:
    least, most = bounds(name)

    needed = {"prompt_budget": "auto"} if name.startswith("target_") else {}
    for value in (least, most):
        assert getattr(load_settings({**needed, name: str(value)}), name) == value


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("wrong", ["-1", "-1e-300", "1e300", "1" + "0" * 400, "nan", "inf", "-inf"])
def test_beyond_its_range_it_is_refused_with_the_range(name: str, wrong: str) -> None:
    least, most = bounds(name)

    with pytest.raises(ConfigError) as refused:
        load_settings({name: wrong})

    said = str(refused.value)
    assert said.startswith(f"{name} = ")
    assert said.endswith(f"{least:,} to {most:,} is allowed")


@pytest.mark.parametrize("name", [name for name in NUMBERS if name.endswith(("_s", "_ms"))])
def test_a_time_of_almost_nothing_is_refused_unless_it_may_be_none(name: str) -> None:
    if bounds(name)[0] == 0:
        assert getattr(load_settings({name: "1e-300"}), name) == 1e-300
    else:
        with pytest.raises(ConfigError, match="is allowed"):
            load_settings({name: "1e-300"})


def test_watts_have_a_range() -> None:
    with pytest.raises(ConfigError, match="1,000,000 at most"):
        load_settings({"power_levels": "1,2,1e300"})


@pytest.mark.parametrize("key", ["id", "group"])
@pytest.mark.parametrize("sign", ["\n", "\r", "\x85", "\u2028", "\u202e", "\x1b"])
def test_what_cannot_be_seen_is_in_no_name(key: str, sign: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} .* printable"):
        parse_worker({"url": "http://a:1", key: f"a{sign}b"})


@pytest.mark.parametrize(
    "url", ["http://a:1/\nb", "http://a:1/b c", "http://bücher:1", "http://a:1/ü"]
)
def test_an_address_is_plain(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        parse_worker({"url": url})
