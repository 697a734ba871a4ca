"""API keys: how they are written, whose a key is, and what each may do."""

from pathlib import Path

import pytest

from router.access.key_files import KeySource, first_key, read_key
from router.access.key_limits import NAMED, OTHERS, KeyLimits
from router.access.key_ring import KeyRing, Rate, digest_of, parse_keys, ring
from router.core.errors import ConfigError, KeyLimitError
from router.core.targets import Targets

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
LINES = f"""
# who asks
alice {ALICE}
bob   {BOB}  weight=2.5 concurrency=2 rate=3/min ttft_ms=500 tpot_ms=0.5
"""


def keys(text: str = LINES) -> KeyRing:
    return ring(parse_keys(text, "keys"), "keys")


def test_a_key_is_known_by_its_hash_alone() -> None:
    found = keys().find(BOB.encode())

    assert found is not None
    assert (found.name, found.digest) == ("bob", digest_of(BOB.encode()))
    assert (found.weight, found.concurrency, found.rate) == (2.5, 2, Rate(3, 60.0))
    assert found.targets == Targets(0.5, 0.0005)
    assert BOB not in repr(keys().by_name)


@pytest.mark.parametrize(
    ("after", "changes"),
    [
        (LINES, ""),
        (LINES + "carol sk-carol-0123456789", "added carol"),
        (LINES.replace("alice", "adele"), "added adele, removed alice"),
        (LINES.replace("weight=2.5", "").replace("alice", "# alice"), "removed alice, changed bob"),
    ],
)
def test_changes_of_keys_are_named(after: str, changes: str) -> None:
    assert keys(after).changes_since(keys()) == changes


@pytest.mark.parametrize("shown", ["", "alice", ALICE[:-1], ALICE + "x", ALICE.upper()])
def test_what_is_no_key_is_nobodys(shown: str) -> None:
    assert keys().find(shown.encode()) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys holds no key"),
        ("# nobody", "keys holds no key"),
        (ALICE, "line 1: a key needs a name"),
        (f"a/b {ALICE}", "line 1: a name has letters"),
        ("alice short", "line 1: the key of 'alice' is not one of 16 to 1024"),
        (f"a {ALICE}\na {BOB}", "two keys are called 'a'"),
        (f"a {ALICE}\nb {ALICE}", "'a' and 'b' have one key"),
        (f"a {ALICE} wait=2", "not 'wait=2'"),
        (f"a {ALICE} weight=2 weight=3", "each once"),
        (f"a {ALICE} weight", "not 'weight'"),
        (f"a {ALICE} weight=heavy", "weight=heavy is not a number"),
        (f"a {ALICE} weight=0", "from 0.001 to 1000"),
        (f"a {ALICE} concurrency=0", "concurrency=0 is not a whole number above 0"),
        (f"a {ALICE} rate=10", "as in 10/s, 600/min or 90/h"),
        (f"a {ALICE} rate=0/s", "as in 10/s"),
        (f"a {ALICE} ttft_ms=0", "ttft_ms=0 is not a number above 0, as in 500"),
        (f"a {ALICE} tpot_ms=-40", "tpot_ms=-40 is not a number above 0"),
    ],
)
def test_lines_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        keys(text)

    assert message in str(error.value)
    assert ALICE not in str(error.value)


def test_keys_come_from_file_and_environment_and_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {ALICE} weight=3")
    monkeypatch.setenv("EVENSTEP_API_KEYS", f"bob {BOB}; eve sk-eve-0123456789ab rate=9/h")
    source = KeySource(str(file), "EVENSTEP_API_KEYS")
    assert set(source.ring.by_name) == {"alice", "bob", "eve"}
    assert (source.weight("alice"), source.weight("bob"), source.weight("gone")) == (3, 1, 1)

    file.write_text("alice")
    with pytest.raises(ConfigError, match="line 1"):
        source.read(str(file))
    assert source.ring.find(ALICE.encode())

    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not text"):
        KeySource(str(file))
    with pytest.raises(ConfigError, match="cannot read the key file"):
        KeySource(f"{file}s")
    with pytest.raises(ConfigError, match="holds no key"):
        KeySource(None)


@pytest.mark.parametrize("text", [f"{ALICE}\n", f"# mine\n\nme {ALICE} weight=2\nyou other\n"])
def test_the_key_of_a_file_that_is_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    assert first_key(str(file)) == ALICE
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        first_key(str(file))


def test_a_file_with_one_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{ALICE}\n")
    assert read_key(str(file)) == ALICE
    file.write_text(f"alice {ALICE}")
    with pytest.raises(ConfigError, match="should hold one key"):
        read_key(str(file))


def test_no_more_under_way_than_the_limit() -> None:
    bob, limits = keys().by_name["bob"], KeyLimits()
    limits.enter(bob, 0.0)
    limits.enter(bob, 0.0)
    with pytest.raises(KeyLimitError, match="2 requests of key 'bob' are under way") as error:
        limits.enter(bob, 0.0)
    assert error.value.retry_after_s == 1

    limits.leave(bob)
    limits.enter(bob, 0.0)
    limits.leave(bob)
    limits.leave(bob)
    counts = limits.counts["bob"]
    assert (counts.requests, counts.under_way) == (3, 0)
    assert counts.limited == {"concurrency": 1, "rate": 0}


def test_no_more_often_than_the_rate() -> None:
    text = f"bob {BOB} rate=3/min"
    bob, limits = keys(text).by_name["bob"], KeyLimits()
    for _ in range(3):
        limits.enter(bob, 100.0)
    for now_s, wait_s in ((100.0, 20), (101.5, 19), (119.9, 1)):
        with pytest.raises(KeyLimitError, match="has made its 3 requests in 60 s") as error:
            limits.enter(bob, now_s)
        assert error.value.retry_after_s == wait_s
    limits.enter(bob, 120.0)
    for _ in range(3):
        limits.enter(bob, 1e6)  # never more at once, however long there was none
    with pytest.raises(KeyLimitError):
        limits.enter(bob, 1e6)
    assert limits.counts["bob"].limited["rate"] == 4


def test_keys_without_limits_have_none_and_their_names_are_bounded() -> None:
    text = "\n".join(f"k{i} sk-0123456789-{i:04}" for i in range(NAMED + 3))
    many, limits = keys(text), KeyLimits()
    limits.name(many.by_name)
    assert len(limits.counts) == NAMED + 1
    for key in many.by_name.values():
        for _ in range(5):
            limits.enter(key, 0.0)
    assert limits.counts["k0"].under_way == 5
    assert limits.counts[OTHERS].under_way == 15
    for key in many.by_name.values():
        limits.leave(key)
    assert (limits.counts["k0"].under_way, limits.counts[OTHERS].under_way) == (4, 12)
