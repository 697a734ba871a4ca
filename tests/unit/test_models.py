"""Which group serves which model."""

import pytest

from router.cluster import Cluster
from router.errors import EvenstepError, InvalidRequestError, NoWorkerError, UnknownModelError
from router.models import ModelTable
from router.types import WorkerSpec


def table(*groups: str) -> ModelTable:
    """A table of one worker per group, named after it."""
    return ModelTable(Cluster([WorkerSpec(group, "", group) for group in groups]))


def test_a_model_belongs_to_the_first_group_that_serves_it() -> None:
    models = table("one", "two")
    models.learn("two", ["llama", "adapter"])
    models.learn("one", ["qwen", "llama"])
    models.learn("two", ["llama"])
    assert models.names == ["llama", "adapter", "qwen"]
    assert [models.group(name) for name in models.names] == ["two", "two", "one"]


def test_a_single_group_needs_no_name() -> None:
    models = table("one")
    assert models.group(None) == "one"
    models.learn("one", ["llama"])
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
    models.learn("a", known)
    with pytest.raises(error, match=message) as caught:
        models.group(model)
    assert getattr(caught.value, "param", "model") == "model"
