"""Aliases as operators give them."""

import pytest

from router.config.setting_sources import load_settings
from router.core.errors import ConfigError


@pytest.mark.parametrize(
    "given", ["chat=org/llama best=huge=1", ("chat=org/llama", "best=huge=1")], ids=type
)
def test_aliases(given: object) -> None:
    settings = load_settings({"model_alias": given})

    assert settings.aliases == {"chat": "org/llama", "best": "huge=1"}
    assert load_settings({}).aliases == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("chat", "'chat=' should be NAME=MODEL"),
        ("=llama", "'=llama' should be NAME=MODEL"),
        ("a=x a=y", "'a' is given twice"),
        ("a=b b=c", "'a' leads to 'b', an alias too"),
        ("a=a", "'a' leads to 'a', an alias too"),
    ],
)
def test_aliases_that_cannot_be(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings({"model_alias": given})
    assert "--model-alias" in str(caught.value)


def test_aliases_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_MODEL_ALIAS", "chat=llama")

    assert load_settings({}).aliases == {"chat": "llama"}
