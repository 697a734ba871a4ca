import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DECODE = [sys.executable, "-m", "router.cli", "simulate", "decode"]
SMALL = ["--workers", "4", "--slots", "8", "--pool", "16", "--steps", "120", "--warmup", "20"]
KEYS = """avg_imbalance_tokens throughput_tok_s tpot_mean_s ttft_mean_s ttft_p99_s energy_j
    mean_load_tokens max_load_tokens mean_admitted_prompt_tokens max_pool_wait_steps
    slot_bubble_steps decision_ms_p50 decision_ms_p99 parameters"""


def decode(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [*DECODE, *SMALL, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def result(*flags: str) -> dict[str, Any]:
    done = decode(*flags, "--json", "-")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_result_has_all_keys_and_repeats_itself() -> None:
    flags = ("--policy", "least_tokens", "--arrivals", "poisson:300", "--dispatch", "instant")
    one, other = result(*flags), result(*flags)

    assert one.keys() >= set(KEYS.split())
    assert one["parameters"]["arrivals"] == "poisson:300"
    timings = ("decision_ms_p50", "decision_ms_p99")
    assert all(one.pop(key) > 0 and other.pop(key) > 0 for key in timings)
    assert one == other


def test_every_flag_arrives(tmp_path: Path) -> None:
    step_time = tmp_path / "fit.json"
    step_time.write_text('{"base_s": 0.01, "per_token_s": 1e-7, "per_request_s": 1e-5}')
    flags = (
        "--lengths uniform:200,30 --horizon 4 --discount 0.9 --tie-weight 0.01 --deadline-steps 50 "
        "--lookahead miss:0.3 --dispatch-delay 1 --overcommit 1 --drift 2 --prefill-cost 3,256 "
        f"--kv-tokens 9000 --seed 3 --step-time {step_time}"
    )
    used = result(*flags.split())["parameters"]

    assert used["lengths"] == "uniform:200,30"
    assert (used["horizon"], used["discount"], used["tie_weight"]) == (4, 0.9, 0.01)
    assert (used["deadline_steps"], used["lookahead"], used["seed"]) == (50, "miss:0.3", 3)
    assert (used["dispatch_delay"], used["overcommit"], used["kv_tokens"]) == (1, 1, 9000)
    assert used["step_time"] == {
        "base_s": 0.01,
        "per_token_s": 1e-7,
        "per_request_s": 1e-5,
        "per_prompt_token_s": 0,
    }
    profile = used["profile"]
    assert (profile["growth"], profile["request_tokens"]) == (2, pytest.approx(100))
    assert (profile["prefill_beta"], profile["prefill_chunk"]) == (3, 256)


def test_prefill_workers_and_the_parts_of_the_ttft(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = (
        "--arrivals poisson:100 --prefill-workers 2 --prefill-step-time 1e-3,1e-6 "
        "--prefill-chunk 512 --prefill-kv-tokens 20000 --kv-transfer-time 2e-3,0 --size-error 0.25"
    )
    done = decode(*flags.split(), "--json", str(path))

    assert done.returncode == 0, done.stderr
    assert "of TTFT: hand-off wait, ms" in done.stdout
    found = json.loads(path.read_text())
    parts = ["prefill_queue", "prefill", "handoff_wait", "kv_transfer", "first_step"]
    total_s = sum(found[f"{part}_mean_s"] for part in parts)
    assert total_s == pytest.approx(found["ttft_mean_s"])
    assert found["kv_transfer_mean_s"] == pytest.approx(2e-3)
    assert 0 < found["prefill_kept_mean_tokens"] <= found["prefill_kept_max_tokens"] <= 40_000
    assert found["parameters"]["size_error"] == 0.25
    assert found["parameters"]["prefill"] == {
        "workers": 2,
        "time": {"base_s": 1e-3, "per_token_s": 1e-6},
        "chunk": 512,
        "kv_tokens": 20_000,
        "transfer": {"latency_s": 2e-3, "per_token_s": 0.0},
    }


def test_a_table_for_people_and_a_file_for_programs(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = decode("--policy", "fcfs", "--json", str(path))

    assert done.returncode == 0
    assert "imbalance, tokens" in done.stdout
    assert "burstgpt" in done.stdout
    assert json.loads(path.read_text())["parameters"]["policy"] == "fcfs"


def test_bad_input_is_one_line_and_exit_2() -> None:
    done = decode("--policy", "best")

    assert done.returncode == 2
    assert "--policy" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
