"""Which group serves which model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import pytest

from router.core.errors import EvenstepError, InvalidRequestError, NoWorkerError, UnknownModelError
from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.types import Card, Outcome, WorkerSpec
from router.dispatch.models import ModelTable
from tests.support.core import request, snapshot, token


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
    assert models.names == ["llama", "qwen"]
    assert [models.group(name) for name in models.names] == ["two", "one"]
    models.learn("two", cards("qwen"))
    assert [models.group(name) for name in models.names] == ["one", "one"]


def test_groups_of_one_model_share_it_while_they_say_so() -> None:
    cluster = Cluster([WorkerSpec(name, "", name) for name in "abcd"])
    for worker in "abcd":
        cluster.apply(WorkerUp(worker))
    models, shared = ModelTable(cluster), list[list[str]]()
    models.on_shared = lambda lines, _: shared.append(["".join(sorted(line)) for line in lines])
    models.learn("a", cards("llama"))
    assert (models.together("a"), shared) == (("a",), [])
    models.learn("b", cards("llama", "sql"))
    models.learn("c", cards("qwen"))
    assert shared == [["ab", "c", "d"]]
    assert models.askable("a") == models.askable("b") == {"a", "b"}
    assert models.route("llama").lacks == frozenset()
    assert models.route("sql").group == "b"
    assert models.route("sql").lacks == {"a"}
    assert models.route("qwen").lacks == frozenset()
    assert models.all_but("a", 0, frozenset()) == frozenset(), "each group has a first rank"
    models.learn("c", cards("qwen", "sql"))
    models.learn("b", cards("llama"))
    assert models.route("sql").lacks == frozenset()
    assert shared[1:] == [["abc", "d"], ["ab", "c", "d"]]
    models.learn("b", cards("qwen"))
    assert shared[3:] == [["a", "bc", "d"]]
    assert models.together("a") == ("a",)


def test_a_group_without_workers_serves_only_what_no_other_does() -> None:
    cluster = Cluster([WorkerSpec(name, "", name) for name in "ab"])
    models, shared = ModelTable(cluster), list[Sequence[Sequence[str]]]()
    models.learn("a", cards("llama", "sql"))
    models.learn("b", cards("llama"))
    models.on_shared = lambda lines, _: shared.append(lines)
    cluster.leave("a")
    models.leave("a")
    assert shared == [[("a",), ("b",)]]
    assert [models.group(name) for name in ("llama", "sql")] == ["b", "a"]
    cluster.leave("b")
    models.leave("b")
    assert [models.group(name) for name in ("llama", "sql")] == ["b", "a"]
    assert len(shared) == 1
    cluster.dissolve("a")
    assert models.names == ["llama"]
    assert models.group("llama") == "b"


def pair() -> tuple[Cluster, ModelTable]:
    """A table of a group with two workers that are up, and what it is about."""
    cluster = Cluster([WorkerSpec(worker, "") for worker in "ab"])
    for worker in "ab":
        cluster.apply(WorkerUp(worker))
    return cluster, ModelTable(cluster)


def test_an_adapter_is_known_while_some_worker_serves_it() -> None:
    _, models = pair()
    models.learn("a", cards("llama"))
    assert models.lacking("llama") == frozenset(), "b has said nothing yet"
    models.learn("b", cards("llama"))
    assert models.absent == {}
    models.learn("b", cards("llama", "sql"))
    assert models.names == ["llama", "sql"]
    assert models.lacking("sql") == {"a"}
    assert models.lacking("llama") == models.lacking(None) == frozenset()
    models.learn("b", cards("llama"))
    assert models.names == ["llama"]
    with pytest.raises(UnknownModelError):
        models.group("sql")


def test_workers_lack_nothing_that_other_groups_serve() -> None:
    models = table("one", "two")
    models.learn("one", cards("llama"))
    models.learn("two", cards("qwen"))
    assert models.absent == {}


def test_while_all_who_serve_an_adapter_are_down_there_is_no_worker_for_it() -> None:
    cluster, models = pair()
    models.learn("a", cards("llama"))
    models.learn("b", cards("llama", "sql"))
    cluster.apply(WorkerDown("b", "gone"))
    with pytest.raises(NoWorkerError, match="no worker that serves 'sql' is up"):
        models.lacking("sql")
    cluster.apply(WorkerDown("a", "gone"))
    assert models.lacking("sql") == {"a"}, "then nobody serves anything, which is said elsewhere"


def test_what_a_worker_serves_goes_with_it_unless_it_was_the_last() -> None:
    cluster, models = pair()
    models.learn("a", cards("llama"))
    models.learn("b", cards("llama", "sql"))
    for worker, names in (("b", ["llama"]), ("a", ["llama"])):
        models.leave(worker)
        cluster.leave(worker)
        assert models.names == names
    models.leave("c")
    spec = WorkerSpec("d", "")
    cluster.join(spec)
    models.join(spec)
    models.learn("d", cards("qwen"))
    assert models.names == ["qwen"]


def test_prompts_are_computed_elsewhere_if_anybody_there_can() -> None:
    prefills = [WorkerSpec(worker, "", role="prefill") for worker in "pq"]
    models = ModelTable(Cluster([WorkerSpec("a", ""), *prefills]))
    for worker in "apq":
        models.learn(worker, cards("llama", "sql") if worker == "a" else cards("llama"))
    assert models.route("llama").prefills == "default/prefill"
    assert models.route("sql").prefills is None


def divided() -> tuple[Cluster, ModelTable]:
    """Two pairs of a prefill and a decode worker, and a group that has both in one."""
    specs = [WorkerSpec(name, "", name, slots=4) for name in "xyz"]
    specs += [
        WorkerSpec(name, "", group, role="prefill") for name, group in (("px", "x"), ("py", "y"))
    ]
    cluster = Cluster(specs)
    models = ModelTable(cluster)
    for spec in specs:
        cluster.apply(WorkerUp(spec.id))
        models.learn(spec.id, cards("llama", "sql") if spec.id == "z" else cards("llama"))
    return cluster, models


def test_of_lines_with_a_queue_each_the_least_full_is_chosen() -> None:
    cluster, models = divided()
    assert models.divided == {"llama": ("x", "y", "z")}
    chosen = []
    for number in range(6):
        route = models.route("llama")
        chosen.append(route.group)
        group = f"{route.group}/prefill" if route.prefills else route.group
        cluster.apply(Arrived(replace(request(number), group=group)))
        if number == 2:
            cluster.apply(Dispatched(token(0), "px"))
    assert chosen == [*"xyzxyz"]
    assert models.route("sql").group == "z"
    assert models.route("llama").lacks == frozenset()

    cluster.apply(WorkerDown("x", "gone"))
    assert models.route("llama").group == "y"
    assert [group.name for group in models.serving("llama")] == [*"xyz"]
    models.learn("y", cards("llama", "more"))
    models.learn("z", cards("more"))
    assert models.divided == {"llama": ("x", "y"), "more": ("y", "z")}
    assert models.lacking("more") == {"py"}
    for worker in "yz":
        cluster.apply(WorkerDown(worker, "gone"))
    assert models.route("llama").group == "x"


def test_without_its_last_prefill_worker_a_group_shares_the_queue_of_the_others() -> None:
    cluster, models = divided()
    for worker in ("px", "py"):
        cluster.leave(worker)
        models.leave(worker)
    assert models.divided == {}
    assert sorted(models.together("x")) == [*"xyz"]


def test_a_faster_line_gets_more_once_all_are_known() -> None:
    cluster, models = divided()

    def serve(worker: str, number: int, seconds: float) -> None:
        cluster.apply(Arrived(replace(request(number), group=worker)))
        cluster.apply(Dispatched(token(number), worker, 0.0))
        cluster.apply(Ended(token(number), Outcome.COMPLETED, seconds))

    for number in range(40):
        serve("x", number, 9.0)
        serve("y", 100 + number, 1.0)
    cluster.apply(Arrived(replace(request(200), group="y")))
    assert models.route("llama").group == "x", "of z nothing is known"
    for number in range(40):
        serve("z", 300 + number, 9.0)
    assert models.route("llama").group == "y"


def ask(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these groups ask for the content of requests, and no others."""
    asks = property(lambda group: group.name in names)
    monkeypatch.setattr(Group, "asks_for_content", asks)


def test_content_is_asked_for_where_one_of_the_lines_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, models = divided()
    ask(monkeypatch)
    assert models.cached_as("llama") is None
    ask(monkeypatch, "y")
    assert models.cached_as("llama") is not None
    assert models.cached_as("sql") is None


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


def test_of_a_long_name_the_begin_is_repeated() -> None:
    models = table("one")
    models.learn("one", cards("m"))
    with pytest.raises(UnknownModelError) as refused:
        models.group("x" * 1_000_000)

    assert refused.value.message == (f"The model `{'x' * 200}…` does not exist. Valid aliases: m.")


def test_the_most_slots_are_those_that_an_engine_reports() -> None:
    cluster = Cluster([WorkerSpec("a", "", slots=9), WorkerSpec("b", "")])
    models = ModelTable(cluster)
    assert models.route(None).most_slots is None

    for worker_id, slots in (("a", 4), ("b", 6)):
        told = msgspec.structs.replace(snapshot("full", 1), slots=slots)
        cluster.apply(SnapshotReceived(worker_id, told, 0.0))
        assert models.route(None).most_slots == (None if worker_id == "a" else 6)
    cluster.apply(WorkerDown("b", "it restarts"))
    assert models.route(None).most_slots is None, "one that fits there waits for it"


def test_a_rank_leaves_only_its_workers() -> None:
    cluster = Cluster([WorkerSpec("a", "x", rank=4), WorkerSpec("b", "y"), WorkerSpec("c", "z")])
    models, none = ModelTable(cluster), frozenset[str]()
    for worker in "ab":
        cluster.apply(WorkerUp(worker))
    assert models.all_but("default", 4, none) == {"b", "c"}
    assert models.all_but("default", 1, frozenset({"a"})) == {"a", "c"}, "the second in order"
    with pytest.raises(InvalidRequestError, match="rank 0; there are 1, 2, 4"):
        models.all_but("default", 0, none)
    with pytest.raises(NoWorkerError, match="no worker of data-parallel rank 2 is up"):
        models.all_but("default", 2, none)


def test_only_groups_that_ask_get_content_and_adapters_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask(monkeypatch, "one")
    cluster = Cluster([WorkerSpec("a", "", "one"), WorkerSpec("b", "", "two")])
    folders = {"": "any", "base": "own"}
    models = ModelTable(cluster, {"alias": "lora"}, tokenizers=folders)
    models.learn("a", {**cards("base"), "lora": {"id": "lora", "parent": "base"}})
    models.learn("b", cards("other"))
    assert models.cached_as("base") == ("base", "", "own")
    assert models.cached_as("lora") == models.cached_as("alias") == ("lora", "lora", "any")
    for name in ("other", "unknown", None):
        assert models.cached_as(name) is None, "of no group that asks, or of no one group"


def test_without_a_name_the_only_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModelTable(Cluster([WorkerSpec("a", "")]))
    ask(monkeypatch, "default")
    assert models.cached_as(None) == ("", "", "")
    ask(monkeypatch)
    assert models.cached_as(None) is None


def test_a_model_whose_group_is_gone_is_unknown_and_no_fault() -> None:
    cluster = Cluster([WorkerSpec("a", "", "one"), WorkerSpec("b", "", "two")])
    models = ModelTable(cluster)
    models.learn("a", cards("base"))
    models.learn("b", cards("other"))
    cluster.leave("a")
    models.leave("a")
    assert cluster.dissolve("one")
    assert models.cached_as("base") is None
    with pytest.raises(UnknownModelError):
        models.route("base")
