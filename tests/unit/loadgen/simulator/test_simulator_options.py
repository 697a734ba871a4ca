"""Options of ``evenstep simulate decode`` that cannot be used."""

from collections.abc import Callable
from pathlib import Path

import pytest

import loadgen.simulator.decode.decode_command

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(evenstep: Callable[..., tuple[int, str, str]]) -> Run:
    """Call ``evenstep simulate decode`` with flags: its exit code and stderr."""
    small = ("--workers", "2", "--slots", "2", "--steps", "20", "--warmup", "0")

    def call(*flags: str) -> tuple[int, str]:
        code, _, err = evenstep("simulate", "decode", *small, *flags)
        return code, err

    return call


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--policy best", "--policy: unknown policy 'best'"),
        ("--lengths constant:0,5", "--lengths: '0' is not"),
        ("--lengths constant:9,5 --trace burstgpt", "--trace and --lengths: give one"),
        ("--trace /nonexistent.csv", "/nonexistent.csv: No such file"),
        ("--trace burstgpt --arrivals trace", "has no arrival times"),
        ("--lengths constant:9,5 --arrivals trace", "--arrivals trace needs a --trace"),
        ("--arrivals poisson:-1", "--arrivals: 'poisson:-1' is unknown"),
        ("--lookahead hindsight", "--lookahead: 'hindsight' is unknown"),
        ("--step-time 0,1", "--step-time takes"),
        ("--step-time -1,1", "--step-time takes"),
        ("--step-time 1,0,1", "--step-time: t_r needs"),
        ("--prefill-cost 3", "--prefill-cost takes"),
        ("--prefill-cost 3,1.5", "--prefill-cost takes"),
        ("--prefill-cost 3,0", "--prefill-cost takes"),
        ("--drift -1", "--drift takes"),
        ("--warmup 20", "--warmup 20 leaves none"),
        ("--workers 0", "--workers must be at least 1"),
        ("--workers 1000000000 --slots 1000000000", "--workers must be at most 1,000,000"),
        ("--workers 10000 --slots 10000", "--workers times --slots must be at most 1,000,000"),
        ("--horizon 100000000000 --lookahead oracle", "--horizon must be at most 500"),
        ("--tie-weight inf", "--tie-weight must be at most 1,000,000"),
        ("--lead inf", "--lead must be at most 1,000,000,000,000"),
        ("--lead -1", "--lead must be at least 0"),
        ("--discount 2", "--discount must be above 0 and at most 1"),
        ("--discount 5e-324 --horizon 8", "to the power of --horizon 8 must be at least 1e-290"),
        ("--discount 1e-9", "to the power of --horizon 40 must be at least 1e-290"),
        ("--seed 18446744073709551616 --lookahead miss:.3", "--seed must be at most 18,446,744,"),
        ("--lengths constant:1e19,1e19", "not a number of tokens from 1 to 100,000,000"),
        ("--lengths uniform:1e300,5", "not a number of tokens from 1 to 100,000,000"),
        ("--lengths geometric:9,1e30", "not a number of tokens from 1 to 100,000,000"),
        ("--arrivals poisson:1e300", "RATE in requests per engine second, from 1e-09 to 1e+06"),
        ("--arrivals poisson:5e-324", "RATE in requests per engine second, from 1e-09 to 1e+06"),
        ("--drift 1e20", "--drift takes a number from 0 to 1,000, got 1e+20"),
        ("--prefill-cost 1,1e300", "CHUNK a whole number of tokens from 1 to 100,000,000"),
        ("--prefill-cost 1e300,1", "BETA above 0 and up to 1,000,000"),
        ("--step-time 1e308,1e308", "with C above 0 and none above 1e+06, got '1e308,1e308'"),
        ("--step-time 1,5e-324,1", "--step-time: t_r / t_l must be at most"),
        (f"--step-time {'a' * 300}", "is no file that is there, and not C,t_l"),
        ("--policy fcfs --dispatch instant", "policy fcfs can dispatch by pool only"),
        ("--size-error -1", "--size-error must be from 0 to 5, got -1"),
        ("--prefill-chunk 9", "--prefill-chunk is of prefill workers: give --prefill-workers"),
        ("--prefill-step-time 1,1", "--prefill-step-time is of prefill workers"),
        ("--prefill-workers -1", "Invalid value for '--prefill-workers'"),
        ("--prefill-workers 1000000", "--prefill-workers must be from 1 to 100,000"),
        ("--prefill-workers 1 --prefill-chunk 0", "--prefill-chunk must be from 1 to"),
        ("--prefill-workers 1 --prefill-kv-tokens -1", "--prefill-kv-tokens must be from 0 to"),
        ("--prefill-workers 1 --prefill-kv-tokens 9", "--prefill-kv-tokens 9 cannot hold a prompt"),
        ("--prefill-workers 1 --prefill-step-time 0,1", "--prefill-step-time takes C,t_p"),
        ("--prefill-workers 1 --kv-transfer-time 1", "--kv-transfer-time takes L,t"),
        ("--prefill-workers 1 --kv-transfer-time 1e9,0", "any of their seconds must be at most"),
        ("--prefill-workers 1 --prefill-cost 3,9", "--prefill-cost and t_p are of workers that"),
        (
            "--step-time 1,1,0,9 --prefill-cost 3,9",
            "--prefill-cost and a t_p in --step-time: give one",
        ),
        ("--trace none --json /nonexistent/r.json", "--json: cannot write /nonexistent/r.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(run: Run, flags: str, problem: str) -> None:
    code, error = run(*flags.split())

    assert code == 2
    assert problem in error.splitlines()[-1]
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "text", ["[1, 2]", '{"base_s": 1}', "C,t_l", '{"base_s": 0, "per_token_s": 1}']
)
def test_a_file_that_is_no_step_time(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(text)
    code, error = run("--step-time", str(path))

    assert code == 2
    assert "--step-time" in error


def test_the_largest_values_are_simulated(run: Run) -> None:
    sizes = "--lengths geometric:1e8,1e8 --drift 1000 --prefill-cost 1e6,1e8"
    rest = "--horizon 500 --lookahead miss:.3 --seed 18446744073709551615 --lead 1e12 --json -"
    code, error = run(*sizes.split(), *rest.split())

    assert (code, "Warning" in error) == (0, False)


def test_too_little_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(loadgen.simulator.decode.decode_command, "simulate", fill)
    code, error = run("--lengths", "constant:9,5")

    assert code == 2
    assert "--horizon: too much for this machine's memory" in error


def test_an_unknown_form_of_dispatch(run: Run) -> None:
    code, error = run("--dispatch", "later")

    assert code == 2
    assert "'later' is not one of 'pool', 'instant'" in error
