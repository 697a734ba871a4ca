"""Workers that are found, and what becomes of the fleet."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.config.discover_notation import parse_discover
from router.core.errors import ConfigError
from router.discovery import sources
from router.discovery.sources import Found, dns, source_of
from router.kubernetes import Kubernetes
from tests.support.emulated import eventually
from tests.support.kube_api import KubeApi, serving_kube_api
from tests.support.managed import Managed, worker

SLICES = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
PODS = "/api/v1/namespaces/serving/pods"
LWS = "leaderworkerset.sigs.k8s.io"
CHANGES, SEED = 500, 23


class Discovering(Managed):
    """A fleet that follows one source."""

    def __init__(self) -> None:
        super().__init__({})
        self.found = Found((), lambda: None)

    @property
    def urls_there(self) -> set[str]:
        assert {member.state for member in self.fleet.members} <= {"up", "down"}
        return {member.spec.url for member in self.fleet.members}

    @contextlib.asynccontextmanager
    async def following(self, source: sources.Source) -> AsyncIterator[None]:
        self.found = Found([source], lambda: self.fleet.change(self.found.workers, ()))
        running = asyncio.create_task(self.found.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def slices(pods: Sequence[str], leaving: Sequence[str] = ()) -> dict[str, Any]:
    ends = [{"addresses": [ip], "conditions": {"ready": True}} for ip in pods]
    ends += [{"addresses": [ip], "conditions": {"terminating": True}} for ip in leaving]
    labels = {"kubernetes.io/service-name": "engines"}
    return {"metadata": {"labels": labels}, "ports": [{"port": 8000}], "endpoints": ends}


def pod(ip: str, group: int, place: int, **more: Any) -> dict[str, Any]:
    labels = {f"{LWS}/name": "wide", f"{LWS}/group-index": str(group)}
    labels[f"{LWS}/worker-index"] = str(place)
    metadata = {"labels": labels, **more}
    return {"metadata": metadata, "status": {"podIP": ip, "phase": "Running"}}


class Pods:
    """Those of a Service, in two slices; they come, end, go, and come again elsewhere."""

    def __init__(self, api: KubeApi, rng: random.Random) -> None:
        self.api, self.rng = api, rng
        self.there: list[set[str]] = [set(), set()]
        self.leaving: list[set[str]] = [set(), set()]
        self.next = 0

    @property
    def truth(self) -> set[str]:
        return {f"http://{ip}:8000" for ip in self.there[0] | self.there[1]}

    async def change(self) -> None:
        at = self.rng.randrange(2)
        there, leaving = self.there[at], self.leaving[at]
        what = self.rng.choice(["come", "come", "end", "go", "restart"])
        if what in ("end", "restart") and there:
            ip = self.rng.choice(sorted(there))
            there.remove(ip)
            leaving.add(ip)
        if what == "go" and leaving:
            leaving.remove(self.rng.choice(sorted(leaving)))
        if what in ("come", "restart") and len(there) < 12:
            self.next += 1
            there.add(f"10.{at}.{self.next >> 8}.{self.next & 255}")
        told = slices(sorted(there), sorted(leaving))
        await self.api.put(SLICES, f"engines-{at}", told)


async def test_the_fleet_is_the_truth_after_each_of_many_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.kubernetes._FIRST_DELAY_S", 0.01)
    rng, fleet = random.Random(SEED), Discovering()
    async with serving_kube_api() as (api, url):
        pods = Pods(api, rng)
        source = source_of(
            parse_discover("endpointslices:serving/engines,slots=4"), lambda: Kubernetes(url)
        )
        async with fleet.following(source):
            for _ in range(CHANGES):
                trouble = rng.random()
                api.slow_s = 0.02 if trouble < 0.1 else 0.0
                if 0.1 < trouble < 0.2:
                    await api.forget()
                before = fleet.urls_there
                api.cut = 0.2 < trouble < 0.3
                await pods.change()
                if api.cut:
                    assert fleet.urls_there == before
                    api.cut = False
                await eventually(lambda: fleet.urls_there == pods.truth, f"{pods.truth}")
    assert api.lists > 10  # after 410 Gone, and no more
    assert api.lists < CHANGES / 4


async def test_an_api_that_is_gone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.kubernetes._FIRST_DELAY_S", 0.01)
    fleet = Discovering()
    async with serving_kube_api() as (api, url):
        await api.put(SLICES, "engines-a", slices(["10.0.0.1"]))
        given = parse_discover("endpointslices:serving/engines")
        async with fleet.following(source_of(given, lambda: Kubernetes(url))):
            await eventually(lambda: bool(fleet.urls_there), "it is found")
            refused = api.refused
            api.refuse = True
            await api.forget()
            await eventually(lambda: api.refused > refused + 2, "it is asked again and again")
            assert fleet.urls_there == {"http://10.0.0.1:8000"}
            await api.put(SLICES, "engines-a", slices(["10.0.0.2"]))
            api.refuse = False
            await eventually(lambda: fleet.urls_there == {"http://10.0.0.2:8000"}, "it is back")


async def test_pods_of_a_leader_worker_set_are_groups_with_ranks() -> None:
    fleet = Discovering()
    async with serving_kube_api() as (api, url):
        for number in range(4):
            await api.put(PODS, f"wide-{number}", pod(f"10.0.0.{number}", number // 2, number % 2))
        await api.put(PODS, "other", {"metadata": {"labels": {}}, "status": {"podIP": "10.0.0.9"}})
        await api.put(PODS, "ended", pod("10.0.0.8", 0, 1, deletionTimestamp="now"))
        given = parse_discover("lws:serving/wide,port=8200,ranks=2")
        async with fleet.following(source_of(given, lambda: Kubernetes(url))):
            await eventually(lambda: len(fleet.urls_there) == 8, "all are found")
            specs = [member.spec for member in fleet.fleet.members]
            assert {(spec.group, spec.rank, spec.url) for spec in specs} == {
                (
                    f"wide-{number // 2}",
                    number % 2 * 2 + i,
                    f"http://10.0.0.{number}:{8200 + i}",
                )
                for number in range(4)
                for i in range(2)
            }
            await api.delete(PODS, "wide-0")
            await eventually(lambda: len(fleet.urls_there) == 6, "a pod is gone")


async def test_a_watched_file_is_read_again_when_it_is_replaced(tmp_path: Path) -> None:
    fleet, path = Discovering(), tmp_path / "workers.json"

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(path)

    def told(*names: str) -> str:
        return json.dumps({"workers": [{"url": f"http://{name}:1"} for name in names]})

    write(told("a", "b"))
    source = source_of(parse_discover(f"file:{path}"), lambda: Kubernetes("http://none"))
    async with fleet.following(source):
        await eventually(lambda: fleet.urls_there == {"http://a:1", "http://b:1"}, "it is read")
        write(told("b", "c"))
        await eventually(lambda: fleet.urls_there == {"http://b:1", "http://c:1"}, "again")
        write("{")
        write(told("b", "b"))
        write(told("d"))
        await eventually(lambda: fleet.urls_there == {"http://d:1"}, "past what is wrong")


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.1"], [], ["10.0.0.3"]]

    async def resolved(*_: object, **__: object) -> list[Any]:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if not found:
            raise OSError("no answer")
        return [(2, 1, 6, "", (ip, 8000)) for ip in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    fleet = Discovering()
    async with fleet.following(dns(parse_discover("dns:engines:8000"), interval_s=0.01)):
        await eventually(lambda: len(fleet.urls_there) == 2, "both are found")
        await eventually(lambda: fleet.urls_there == {"http://10.0.0.3:8000"}, "the other one")
    assert fleet.found.changes == 2


async def test_of_two_address_families_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(10, 1, 6, "", ("fd00::1", 8000, 0, 0)), (2, 1, 6, "", ("10.0.0.1", 8000))]

    async def resolved(*_: Any, **__: Any) -> Any:
        return both

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    fleet = Discovering()
    async with fleet.following(dns(parse_discover("dns:engines:8000"), interval_s=0.01)):
        await eventually(lambda: fleet.urls_there == {"http://10.0.0.1:8000"}, "one family")
    fleet = Discovering()
    async with serving_kube_api() as (api, url):
        for family, ip in (("IPv6", "fd00::1"), ("IPv4", "10.0.0.1")):
            await api.put(SLICES, family, {**slices([ip]), "addressType": family})
        source = source_of(
            parse_discover("endpointslices:serving/engines"), lambda: Kubernetes(url)
        )
        async with fleet.following(source):
            await eventually(lambda: fleet.urls_there == {"http://10.0.0.1:8000"}, "one family")
            await api.delete(SLICES, "IPv4")
            await eventually(lambda: fleet.urls_there == {"http://[fd00::1]:8000"}, "the other")


def test_a_file_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/workers\.json: there is no folder .*/none"):
        source_of(parse_discover(f"file:{tmp_path}/none/workers.json"), Kubernetes)


async def test_workers_that_conflict_change_nothing() -> None:
    fleet = Discovering()
    twice = [worker("a"), replace(worker("a"), id="c")]

    async def source() -> sources.Source:
        yield [worker("b")]
        yield twice
        await asyncio.Event().wait()

    async with fleet.following(source()):
        await eventually(lambda: fleet.found.changes == 2, "both were told")
        assert fleet.urls_there == {"http://b:1"}
