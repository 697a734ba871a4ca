"""vLLM's schedulers with one name after another that the plug-in does not find; no model.

Only the plug-in's own modules do not find it, as if vLLM had given it another name.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from engine_patches.plugin import compat, compat_names, reporter
from engine_patches.plugin.compat_names import FEATURES, KV_GROUP, OVERRIDDEN, SCHEDULER
from engine_patches.plugin.end_table import EndWriter
from engine_patches.plugin.settings import PlugInError
from engine_patches.scheduler import ADMISSION_NEEDS
from engine_patches.stream import publisher
from router.core.types import DEFAULT_SLOTS
from router.core.wire import BudgetMessage, encode
from tests.support.real_schedulers import Driver, Reader, Schedulers, compare_cache, resident

FLAVOURS = (("EvenstepScheduler", 0), ("EvenstepAsyncScheduler", 1))
SLOTS, BLOCKS, BUDGET = 4, 9, 40
_ABSENT = object()


class _Hidden:
    """An attribute of a class that all but the plug-in find; ``before``: what the class had."""

    def __init__(self, name: str, before: Any) -> None:
        self.name, self.before = name, before

    def __get__(self, owner: Any, class_: Any) -> Any:
        reader = str(sys._getframe(1).f_globals.get("__name__"))
        if reader.startswith("engine_patches.") and reader != "engine_patches.scheduler":
            raise AttributeError(self.name)
        if hasattr(self.before, "__get__"):
            return self.before.__get__(owner, class_)
        if owner is not None and self.name in vars(owner):
            return vars(owner)[self.name]
        if self.before is _ABSENT:
            raise AttributeError(self.name)
        return self.before

    def __set__(self, owner: Any, value: Any) -> None:
        if hasattr(self.before, "__set__"):
            self.before.__set__(owner, value)
        else:
            vars(owner)[self.name] = value

    def __delete__(self, owner: Any) -> None:
        del vars(owner)[self.name]


@contextlib.contextmanager
def without(owner: type, name: str) -> Iterator[None]:
    """Hide an attribute of a class's objects from the plug-in."""
    mro = [base for base in owner.__mro__ if base.__module__.startswith("vllm.")]
    holder = next((base for base in mro if name in vars(base)), owner)
    own = vars(holder).get(name, _ABSENT)
    before = own if own is not _ABSENT else inspect.getattr_static(owner, name, _ABSENT)
    declared = compat_names.declared_by

    def known(class_: type) -> set[str]:
        return declared(class_) - ({name} if issubclass(class_, holder) else set())

    setattr(holder, name, _Hidden(name, before))
    compat_names.declared_by = known
    try:
        yield
    finally:
        compat_names.declared_by = declared
        if own is _ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, own)


Place = tuple[type, str]


def _names(scheduler: Any) -> dict[tuple[Place, ...], set[str]]:
    """Every name of the list by the class that has it, with the features that read it.

    Of "a or b" those that are there are one.
    """
    found: dict[tuple[Place, ...], set[str]] = {}
    for feature, owners in FEATURES.items():
        for owner, names in owners.items():
            for name in names:
                for places in _places(scheduler, owner, name.partition("(")[0]):
                    found.setdefault(places, set()).add(feature)
    return found


def _places(scheduler: Any, owner: str, path: str) -> Iterator[tuple[Place, ...]]:
    """A name, and those on the way to it."""
    if owner not in (SCHEDULER, OVERRIDDEN, KV_GROUP):
        module, _, class_ = owner.rpartition(".")
        yield ((getattr(import_module(module), class_), path),)
        return
    root = scheduler
    if owner == KV_GROUP:
        root = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    if " or " in path:
        ways = [name for name in path.split(" or ") if hasattr(root, name)]
        yield tuple((_class_of(root), name) for name in ways)
        return
    for part in path.split("."):
        yield ((_class_of(root), part),)
        root = getattr(root, part)


def _class_of(owner: Any) -> type:
    """vLLM's, without the plug-in's on top of it."""
    mro = type(owner).__mro__
    return next(base for base in mro if not base.__module__.startswith("engine_patches"))


def hidden(make: Schedulers, steps: int) -> dict[str, Any]:
    """Of each flavour: how many names were hidden, and for which of them an engine said otherwise.

    All that it tells beside is compared with what it has.
    """
    publisher.HEARTBEAT_S, reporter._POLL_S = 0.05, 0.01
    probe = make.make("EvenstepScheduler", caching=True)
    names = _names(probe)
    probe.shutdown()
    ends = Path(tempfile.mkdtemp()) / "ends"
    setattr(compat, "table_path", lambda *_: ends)  # noqa: B010
    report: dict[str, Any] = {}
    for flavour, ahead in FLAVOURS:
        whole = _Run(make, flavour, ahead, steps, ends)
        assert whole.told() == []
        wrong = {}
        for places, features in names.items():
            with contextlib.ExitStack() as stack:
                for place in places:
                    stack.enter_context(without(*place))
                ranks = 2 if features <= {"idle_steps", "group_steps", "shared_steps"} else 1
                told = _Run(make, flavour, ahead, steps, ends, ranks).told()
                found = told, _is_refused(make, flavour)
            if found != (expected(features), refuses(features)):
                wrong[" and ".join(f"{class_.__name__}.{name}" for class_, name in places)] = found
        report[flavour] = {"names": len(names), "steps": whole.compared, "wrong": wrong}
    return report


def expected(features: set[str]) -> list[str] | None:
    """What an engine says that lacks these; None: nothing, as it has no stream."""
    if "settings" in features or {"rank", "ranks"} <= features:
        return None
    said = features - {"admission", "group_steps"}
    if said & {"state", "memory"}:
        said |= {"prefix_cache"}
    if features & {"state", "ranks", "group_steps"}:
        said |= {"prompt_budget"}
    return sorted(said)


def refuses(features: set[str]) -> bool:
    """Whether an engine without these refuses to start with admission."""
    return "settings" not in features and not features.isdisjoint({*ADMISSION_NEEDS, "admission"})


def _is_refused(make: Schedulers, flavour: str) -> bool:
    try:
        make.make(flavour, caching=True, admission={"policy": "headroom"}).shutdown()
    except PlugInError:
        return True
    return False


class _Run:
    """An engine that serves some requests under memory pressure, and a router that reads it."""

    def __init__(
        self, make: Schedulers, flavour: str, ahead: int, steps: int, ends: Path, ranks: int = 1
    ) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self._steps, self._writer = steps, EndWriter(ends, 2 * SLOTS)
        given: dict[str, Any] = {"slots": SLOTS, "blocks": BLOCKS, "step_tokens": 64}
        given |= {"caching": True, "end_signal": True, "ranks": ranks}
        self._scheduler = make.make(flavour, **given)
        self._driver = Driver(self._scheduler, ahead, get_request_block_hasher(32, sha256))
        self.compared = 0

    def told(self) -> list[str] | None:
        """What the stream says that it lacks; None: there is none."""
        if self._scheduler.evenstep is None:
            self._serve(lambda: None)
            self._scheduler.shutdown()
            return None
        reader = Reader(self._scheduler.evenstep.endpoint)
        lacks = {*reader.last.unreported}
        bounded = "prompt_budget" not in lacks and not self._scheduler.evenstep._engine.lockstep
        if bounded:
            told = BudgetMessage("r", reader.last.epoch, reader.last.time_s, BUDGET)
            reader.dealer.send(encode(told))
            reader.ask()  # then it has been taken in
        self._serve(lambda: self._compare(reader, lacks))
        full = reader.ask()
        stateless = "state" in lacks
        assert {*full.unreported} == lacks
        assert (full.kind == "stateless") == self._scheduler.evenstep.failed == stateless
        assert full.prompt_budget == (BUDGET if bounded and not stateless else full.prompt_budget)
        assert bool(reader.feed.known) is not stateless
        self._scheduler.shutdown()
        reader.close()
        return sorted(lacks)

    def _serve(self, each: Callable[[], None]) -> None:
        """The engine's part; each request gets the tokens that it should."""
        rng = random.Random(7)
        shared = [rng.randrange(10, 200) for _ in range(100)]
        for step in range(self._steps):
            if step % 4 == 0 and step < self._steps // 2:
                self._driver.submit([*shared[: 20 + 3 * step], step + 10], 60 + step)
            if self._driver.step() is not None:
                each()
        while self._scheduler.requests:
            if self._driver.step() is not None:
                each()
        for one in self._driver.submitted:
            assert one.num_output_tokens == one.max_tokens
        assert sum(one.num_preemptions for one in self._driver.submitted)

    def _compare(self, reader: Reader, lacks: set[str]) -> None:
        """What is told is what the scheduler has, or not told at all."""
        if "state" in lacks:
            return
        scheduler, feed = self._scheduler, reader.feed
        told = reader.until(scheduler.evenstep._publisher.sequence)
        stats = scheduler.make_stats()
        assert not feed.full_wanted
        assert feed.running == len(scheduler.running)
        assert told.waiting == stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        assert feed.load_tokens == sum(one.num_tokens for one in scheduler.running)
        assert feed.resident_tokens == sum(resident(one) for one in scheduler.running)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        blocks = None if "memory" in lacks else free
        assert told.admissible_blocks == blocks
        assert [one.blocks_used for one in told.kv_groups] == (
            [] if blocks is None else [BLOCKS - 1 - free]
        )
        assert told.slots == (DEFAULT_SLOTS if "slots" in lacks else SLOTS)
        lost = sum(one.num_preemptions for one in self._driver.submitted)
        assert told.preemptions_total == (0 if "preemptions" in lacks else lost)
        found = {one.cached_tokens for one in told.running}
        assert "cached_tokens" not in lacks or found <= {0}
        assert "tokens" not in lacks or not told.scheduled_decode_tokens
        assert (told.cache_block == 0) is ("prefix_cache" in lacks)
        if "prefix_cache" not in lacks:
            compare_cache(self._driver, reader, {"steps": 1, "most_blocks": 0})
        assert told.ranks == (0 if "ranks" in lacks else told.ranks)
        self.compared += 1
