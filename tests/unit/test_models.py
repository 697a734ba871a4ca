"""Which group serves which model."""

from collections.abc import Mapping

import pytest

from router.cluster import Cluster
from router.errors import EvenstepError, InvalidRequestError, NoWorkerError, UnknownModelError
from router.models import Card, ModelTable
from router.types import WorkerSpec


def table(*groups: str, aliases: Mapping[str, str] | None = None) -> ModelTable:
    """A table of one worker per group, named after it."""
    return ModelTable(Cluster([WorkerSpec(group, "", group) for group in groups]), aliases or {})


def cards(*models: str) -> dict[str, Card]:
    """What an engine says of these models."""
    return {name: {"id": name, "max_model_len": len(name)} for name in models}


def test_a_model_belongs_to_the_first_group_that_serves_it() -> None:
    models = table("one", "two")
    models.learn("two", cards("llama", "adapter"))
    models.learn("one", cards("qwen", "llama"))
    models.learn("two", cards("llama"))
    assert models.names == ["llama", "adapter", "qwen"]
    assert [models.group(name) for name in models.names] == ["two", "two", "one"]


def test_a_single_group_needs_no_name() -> None:
    models = table("one")
    assert models.group(None) == "one"
    models.learn("one", cards("llama"))
    assert models.group(None) == "one"


@pytest.mark.parametrize(
    ("groups", "known", "model", "error", "message"),
    [
        ("ab", ["x", "y"], None, InvalidRequestError, "name a 'model', one of: x, y"),
        ("ab", ["x"], "z", UnknownModelError, "The model `z` does not exist."),
        ("a", ["x"], "z", UnknownModelError, "The model `z` does not exist."),
        ("a", [], "z", NoWorkerError, "no worker has answered yet"),
        ("ab", [], None, NoWorkerError, "no worker has answered yet"),
    ],
)
def test_without_a_group_the_client_is_told_why(
    groups: str, known: list[str], model: str | None, error: type[EvenstepError], message: str
) -> None:
    models = table(*groups)
    models.learn("a", cards(*known))
    with pytest.raises(error, match=message) as caught:
        models.group(model)
    assert getattr(caught.value, "param", "model") == "model"


def test_an_alias_is_listed_as_the_model_it_is_for() -> None:
    models = table("one", "two", aliases={"chat": "llama", "best": "huge"})
    assert models.cards == []

    models.learn("two", cards("qwen", "llama"))

    card = {"id": "chat", "root": "llama", "max_model_len": 5}
    assert models.cards == [*cards("qwen", "llama").values(), card]
    assert models.resolve("chat") == models.resolve("llama") == "llama"
    assert models.resolve(None) is None
    with pytest.raises(InvalidRequestError, match="one of: qwen, llama, chat"):
        models.group(None)
    with pytest.raises(UnknownModelError, match="`huge`"):
        models.group(models.resolve("best"))


def test_an_alias_goes_before_a_model_of_that_name() -> None:
    models = table("one", aliases={"qwen": "llama"})
    models.learn("one", cards("qwen", "llama"))

    assert [card["id"] for card in models.cards] == ["llama", "qwen"]
    assert models.cards[1]["max_model_len"] == 5
    assert models.resolve("qwen") == "llama"
