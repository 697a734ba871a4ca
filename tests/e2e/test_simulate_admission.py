import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_patches.admission import ADMISSIONS
from loadgen.simulator.admission.scenarios import SCENARIOS

COMMAND = [sys.executable, "-m", "router.cli", "simulate", "admission"]
KEYS = """evictions_per_1k throughput_tok_s latency_mean_s latency_p99_s ttft_mean_s ttft_p99_s
    completed kv_used_mean kv_used_max preemptions parameters"""


def admission(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False
    )


def result(*flags: str) -> dict[str, Any]:
    done = admission("--requests", "400", *flags, "--json", "-")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_result_has_all_keys_and_repeats_itself() -> None:
    flags = ("--policy", "headroom", "--scenario", "chat70b", "--rate", "11", "--seed", "3")
    one, other = result(*flags), result(*flags)

    assert one == other
    assert one.keys() >= set(KEYS.split())
    assert one["completed"] == 400
    parameters = one["parameters"]
    assert (parameters["policy"], parameters["headroom"], parameters["seed"]) == (
        "headroom",
        0.05,
        3,
    )
    assert (parameters["prediction"], parameters["eviction"]) == ("exact", "keep")


def test_every_flag_arrives(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = (
        "--policy memory_checked --scenario vidur8b_low --rate 300 --requests 300 --seed 5 "
        "--predict lognormal:0.8 --margin 0.2 --eviction restart --order prefill_first "
        "--watermark 0.01 --kv-tokens 900 --block-size 4 "
        "--max-num-seqs 40 --max-num-batched-tokens 600 --step-time 1e-2,1e-7,1e-5,1e-4 "
        "--free-tokens 50"
    )
    done = admission(*flags.split(), "--settings", '{"length_margin": 0.1}', "--json", str(path))

    assert done.returncode == 0, done.stderr
    assert "evictions in 1,000 requests" in done.stdout
    found = json.loads(path.read_text())
    used = found["parameters"]
    assert found["completed"] == 300
    assert (used["policy"], used["scenario"], used["rate"]) == (
        "memory_checked",
        "vidur8b_low",
        300,
    )
    assert (used["prediction"], used["margin"], used["length_margin"]) == (
        "lognormal:0.8",
        0.2,
        0.1,
    )
    assert (used["eviction"], used["order"], used["watermark"]) == (
        "restart",
        "prefill_first",
        0.01,
    )
    assert (used["kv_tokens"], used["max_num_seqs"], used["max_num_batched_tokens"]) == (
        900,
        40,
        600,
    )
    assert list(used["step_cost"].values()) == [1e-2, 1e-7, 1e-5, 1e-4]
    assert (used["seed"], used["free_tokens"], used["block_size"]) == (5, 50, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy", "fcfs"), "--policy: there is no policy 'fcfs'; known: alpha_beta"),
        (("--scenario", "chat"), "--scenario: unknown scenario 'chat'; did you mean chat70b?"),
        (("--settings", '{"headrom": 0.1}'), "did you mean headroom?"),
        (("--settings", "[1]"), "--settings takes an object"),
        (("--settings", "{"), "--settings is no JSON"),
        (("--settings", '{"policy": "off"}'), "--settings: give policy as an option of its own"),
        (("--margin", "0.1"), "--margin does nothing for --policy headroom"),
        (
            ("--margin", "2", "--policy", "memory_checked"),
            "--margin: margin: Expected `float` <= 0.9",
        ),
        (("--step-time", "0,1"), "--step-time takes C,t_l[,t_r[,t_p]]"),
        (("--kv-tokens", "500"), "--kv-tokens 500 is too small"),
        (("--requests", "0"), "--requests must be from 1 to 5e+06, got 0"),
    ],
)
def test_what_cannot_be_is_refused(flags: tuple[str, ...], message: str) -> None:
    done = admission(*flags)

    assert done.returncode == 2
    assert message in done.stderr


def test_what_is_printed_in_the_paper_warns_and_ends() -> None:
    done = admission(
        *("--policy", "wait", "--scenario", "vidur8b_low", "--rate", "200", "--requests", "300"),
        *("--settings", '{"strict": true, "thresholds": [2, 2]}'),
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: strict: requests that run pause until")
    assert "300" in done.stdout.split("completed")[1].split("\n")[0]


def test_help_says_what_every_policy_and_scenario_is() -> None:
    told = [line.split() for line in admission("--help").stdout.splitlines()]

    assert all([name, *row.summary.split()] in told for name, row in ADMISSIONS.items())
    assert all([name, *row.summary.split()] in told for name, row in SCENARIOS.items())


def test_sarathi_computes_prompts_in_smaller_chunks() -> None:
    assert result("--order", "sarathi")["parameters"]["max_num_batched_tokens"] == 512
