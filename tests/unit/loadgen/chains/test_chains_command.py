"""``evenstep simulate chains``: what it prints, and options that cannot be used."""

import json
import sys
from collections.abc import Callable

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(evenstep: Run) -> Run:
    """Call it with flags, few requests unless they say more: exit code, stdout, stderr."""

    def call(*flags: str) -> tuple[int, str, str]:
        small = () if "--requests" in flags else ("--requests", "300", "--warmup", "20")
        return evenstep("simulate", "chains", "--repeats", "2", *small, *flags)

    return call


def test_the_keys(run: Run) -> None:
    code, out, err = run(
        "--policy", "jffc,sed", "--rate", ".8", "--dispatch", "instant", "--json=-"
    )
    report = json.loads(out)

    assert code == 0
    assert "jffc (pool)" in err
    assert "sed (instant)" in err
    assert report["lower_s"] < report["response_mean_s"] < report["upper_s"]
    assert report["stable"] is True
    assert report["rate"] == 0.8 < report["total_rate"]
    assert report["response_mean_s"] == pytest.approx(
        report["waiting_mean_s"] + report["service_mean_s"]
    )
    assert report["response_mean_ci_s"] > 0
    assert report["response_p99_s"] > report["response_mean_s"]
    assert [each["policy"] for each in report["policies"]] == ["jffc", "sed"]
    assert report["policies"][0]["against_first"] == {"mean": 0.0, "half_width": 0.0}
    assert sum(report["chains"][0]["blocks"]) == 70
    assert report["chains"][0]["service_rate"] == 1 / report["chains"][0]["service_s"]
    assert report["parameters"]["scenario"]["model"]["blocks"] == 70


@pytest.mark.parametrize(
    ("flags", "reserved", "chained"),
    [
        ("", 7, True),
        ("--reserved 3", 3, True),
        ("--tune-by surrogate --rate .5", 9, True),
        ("--allocation disjoint", 7, True),
        ("--allocation ilp", 7, True),
        ("--allocation dynamic", 7, False),
        ("--placement petals", 2, False),
        ("--placement petals --reserved 4 --allocation gca", 4, True),
        ("--placement bprr", 2, False),
        ("--placement bprr --reserved 5", 5, False),
        ("--placement whole --scenario llama2-7b", 1, True),
        ("--placement whole --scenario llama2-7b --allocation gca", 1, True),
        ("--arrivals trace --service trace --trace azure-conv --load .5", 7, True),
        ("--service trace --trace burstgpt", 7, True),
        ("--servers 30 --fast-share .5 --load .4", None, True),
    ],
)
def test_placements_and_allocations(
    run: Run, flags: str, reserved: int | None, chained: bool
) -> None:
    code, out, err = run(*flags.split(), "--json=-")
    report = json.loads(out)

    assert code == 0
    assert reserved in (None, report["reserved_slots"])
    assert (len(report["chains"]) > 0) is chained
    assert ("no chains: each request" in err) is not chained
    assert (report["upper_s"] is not None) is chained
    assert report["response_mean_s"] > 0


def test_a_single_repeat_has_no_interval(evenstep: Run) -> None:
    small = "simulate chains --repeats 1 --requests 300 --warmup 20 --json -"
    code, out, err = evenstep(*small.split())

    assert code == 0
    assert json.loads(out)["response_mean_ci_s"] is None
    assert "+-" not in err


def test_more_than_chains_complete(run: Run) -> None:
    code, out, err = run("--load", "1.5", "--json=-")
    report = json.loads(out)

    assert code == 0
    assert (report["stable"], report["lower_s"], report["upper_s"]) == (False, None, None)
    assert "the queue only grows" in err


def test_the_fewest_slots_suffice(run: Run) -> None:
    slots = {}
    for allocation in ("gca", "ilp"):
        report = json.loads(run("--rate", ".5", "--allocation", allocation, "--json=-")[1])
        assert report["total_rate"] >= 0.5 / 0.7
        slots[allocation] = sum(chain["slots"] for chain in report["chains"])

    assert slots["ilp"] < slots["gca"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--policy jfcf", "--policy: unknown policy 'jfcf'; did you mean jffc?"),
        ("--policy bfio", "--policy: 'bfio' is none for chains"),
        ("--policy jsq,jsq", "--policy: each one once"),
        (
            "--policy jffc --dispatch instant",
            "--dispatch instant: policy jffc can dispatch by pool only",
        ),
        ("--policy sed --placement petals", "--policy does nothing with --allocation dynamic"),
        ("--scenario gpt", "--scenario: unknown scenario 'gpt'; known: bloom176b"),
        ("--servers 0", "--servers must be from 1 to 10000, got 0"),
        ("--servers 3", "3 servers"),
        ("--fast-share 2", "--fast-share must be from 0 to 1, got 2"),
        ("--rate 0", "--rate must be from 1e-09"),
        ("--rate nan", "--rate must be from 1e-09"),
        ("--load 0", "--load must be from 1e-09 to 10"),
        ("--target-load 0", "--target-load must be from 1e-09 to 1"),
        ("--reserved 0", "--reserved must be from 1"),
        ("--reserved 200", "--reserved 200 leaves too little memory"),
        ("--requests 10 --warmup 10", "--warmup 10 leaves none of the 10 --requests"),
        ("--repeats 0", "--repeats must be from 1 to 1000"),
        ("--seed -1", "--seed must be from 0"),
        ("--trace azure-conv", "--trace does nothing without"),
        ("--scenario llama2-7b --placement whole --reserved 5", "--reserved does nothing with"),
        ("--trace burstgpt --arrivals trace", "has no arrival times"),
        ("--placement whole", "20 servers leave 70 of 70 blocks without a place"),
        ("--placement petals --reserved 400", "leave 70 of 70 blocks without a place"),
        ("--placement petals --allocation disjoint", "disjoint: petals makes no such chains"),
        ("--allocation ilp --reserved 3 --rate 5", "cannot complete 7.14286 requests per second"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(run: Run, flags: str, problem: str) -> None:
    code, _, error = run(*flags.split())

    assert code == 2
    assert problem in error.splitlines()[-1]
    assert "Traceback" not in error


def test_without_highs_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    for name in ("loadgen.chains.ilp", "router.core.policies.bfio.exact_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    code, _, error = run("--allocation", "ilp")

    assert code == 2
    assert "pip install highspy" in error
    assert run()[0] == 0
