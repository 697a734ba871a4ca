"""The replicas' lock as a Lease, over a socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.core.errors import ConfigError
from router.kubernetes import Kubernetes, KubernetesError
from router.replicas.lease import LeaseLock
from router.replicas.locks import lock_of
from tests.support.kube_api import serving_kube_api

FREE = {"spec": {"holderIdentity": "", "leaseTransitions": 2}}
LEASES = "/apis/coordination.k8s.io/v1/namespaces/serving/leases"


@contextlib.asynccontextmanager
async def locks_of(url: str, count: int = 1) -> AsyncIterator[list[LeaseLock]]:
    apis = [Kubernetes(url) for _ in range(count)]
    yield [LeaseLock(each, "serving", "evenstep", 5) for each in apis]
    for each in apis:
        await each.aclose()


async def test_a_lease_is_made_renewed_and_handed_over() -> None:
    async with serving_kube_api() as (api, url), locks_of(url, 3) as (one, other, third):
        await api.put(LEASES, "evenstep", FREE)
        assert await one.attempt("one") == "one"
        assert await one.attempt("one") == "one"
        assert await other.attempt("other") == "one"
        spec = api.objects[LEASES]["evenstep"]["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("one", 5)
        await one.release("one")
        assert await other.attempt("other") == "other"
        assert api.objects[LEASES]["evenstep"]["spec"]["leaseTransitions"] == 5
        assert await third.attempt("third") == "other"


async def test_a_lease_that_is_new_or_was_deleted_is_nobodys_for_its_time() -> None:
    async with serving_kube_api() as (api, url):
        now_s = 0.0
        locks = [LeaseLock(Kubernetes(url), "serving", "evenstep", 5, lambda: now_s) for _ in "ab"]

        async def held() -> list[str]:
            return [await lock.attempt(name) for name, lock in zip("ab", locks, strict=True)]

        assert await held() == ["", ""]
        now_s = 5.0
        assert await held() == ["a", "a"]
        await api.delete(LEASES, "evenstep")
        assert await held() == ["", ""]
        now_s = 9.9
        assert await held() == ["", ""]
        now_s = 10.0
        assert [await lock.attempt("b") for lock in reversed(locks)] == ["b", "b"]
        assert await locks[0].look() == "b"
        for lock in locks:
            await lock.aclose()


async def test_a_lease_that_was_released_is_taken_and_keeps_its_labels() -> None:
    async with serving_kube_api() as (api, url), locks_of(url) as (lock,):
        await api.put(LEASES, "evenstep", {**FREE, "metadata": {"labels": {"a": "b"}}})
        assert await lock.attempt("me") == "me"
        assert api.objects[LEASES]["evenstep"]["metadata"]["labels"] == {"a": "b"}


async def test_of_two_that_write_at_once_one_is_refused() -> None:
    async with serving_kube_api() as (api, url), locks_of(url, 4) as locks:
        await api.put(LEASES, "evenstep", FREE)
        held = await asyncio.gather(*(lock.attempt(str(i)) for i, lock in enumerate(locks)))
        assert len(set(held)) == 1


async def test_an_api_that_refuses_or_is_gone_is_an_error() -> None:
    async with serving_kube_api() as (_, url):
        client = Kubernetes(url)
        with pytest.raises(KubernetesError, match="not found"):
            await client.ask("PUT", f"{LEASES}/none", {})
    with pytest.raises(KubernetesError):
        await client.ask("GET", LEASES)
    await client.aclose()


@pytest.mark.parametrize("text", ["lock", "file:", "lease:evenstep", "lease:a/b/c"])
def test_other_texts_name_no_lock(text: str) -> None:
    with pytest.raises(ConfigError, match="should be file:PATH or lease:NAMESPACE/NAME"):
        lock_of(text, api="http://127.0.0.1:8001")


def test_a_file_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*gone; it should be a file"):
        lock_of(f"file:{tmp_path}/gone/lock")
    with pytest.raises(ConfigError, match="is a folder"):
        lock_of(f"file:{tmp_path}")


def test_without_a_cluster_its_api_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="this is no pod; give --kubernetes-api"):
        lock_of("lease:serving/evenstep")
