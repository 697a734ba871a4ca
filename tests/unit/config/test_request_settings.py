"""Aliases as operators give them."""

import re
import sys
from pathlib import Path

import pytest

from router.config.setting_sources import changed, load_settings
from router.core.errors import ConfigError
from tests.support.byte_tokenizer import byte_tokenizer


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


def test_tokenizers_are_read_at_the_start(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path)
    settings = load_settings({"tokenizer": f"{folder} org/llama={folder}"})
    assert settings.tokenizers == {"": str(folder), "org/llama": str(folder)}
    (other := tmp_path / "other").mkdir()
    byte_tokenizer(other, "{% for %}")
    for broken in (str(other), f"llama={tmp_path / 'absent'}"):
        with pytest.raises(ConfigError, match="--tokenizer") as caught:
            load_settings({"tokenizer": broken})
        assert broken.removeprefix("llama=") in str(caught.value)
    with pytest.raises(ConfigError, match=re.escape(f"'{tmp_path.parent / 'tokenizer.json'}'")):
        load_settings({"tokenizer": str(tmp_path.parent)})


def test_other_settings_change_without_reading_a_tokenizer_again(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path)
    settings = load_settings({"tokenizer": str(folder)})
    (folder / "tokenizer.json").unlink()
    assert changed(settings, {"pool_size": 7}).pool_size == 7


def test_a_tokenizer_needs_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'evenstep\[tokenizer\]'"):
        load_settings({"tokenizer": str(tmp_path)})


def test_aliases_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_MODEL_ALIAS", "chat=llama")

    assert load_settings({}).aliases == {"chat": "llama"}
