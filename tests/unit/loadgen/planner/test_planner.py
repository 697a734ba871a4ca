"""``evenstep plan``: chains out of unequal GPUs, and what is written for them."""

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.planner.gpus import GPUS
from tests.support.docs import text_of, words

Run = Callable[..., tuple[int, str, str]]
Ask = Callable[..., dict[str, Any]]

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "deploy" / "plan"
PAGE = "docs/chains.md"

# BLOOM-176B on servers of two kinds, as in section 4.1.1 of the paper.
BLOOM = """
[model]
name = "bigscience/bloom"
blocks = 70
block_gb = 1.32
kv_bytes_per_token = 57344
flops_per_token = 5e9

[workload]
input_tokens = 2000
output_tokens = 20

[engine]
gpu_memory_utilization = 1
reserve_gb = 0

[times]
compute_efficiency = 1
bandwidth_efficiency = 1
"""
FAST = '[[servers]]\nname = "fast"\nmemory_gb = 40\nbandwidth_gb_s = 1020\ntflops = 120\n'
SLOW = '[[servers]]\nname = "slow"\nmemory_gb = 20\nbandwidth_gb_s = 510\ntflops = 80\n'
TWENTY = f"{BLOOM}{FAST}count = 4\nrtt_s = 0.04\n{SLOW}count = 16\nrtt_s = 0.04\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def written(text: str) -> str:
        file = tmp_path / "servers.toml"
        file.write_text(text)
        return str(file)

    return written


@pytest.fixture
def ask(evenstep: Run, write: Callable[[str], str]) -> Ask:
    def asked(text: str, *arguments: str) -> dict[str, Any]:
        code, out, told = evenstep("plan", "--config", write(text), *arguments, "--json", "-")
        assert code == 0, told
        found: dict[str, Any] = json.loads(out)
        return found

    return asked


def test_chains_hold_all_blocks_within_memory(ask: Ask) -> None:
    found = ask(TWENTY, "--rate", "0.2")

    assert found["stable"]
    assert found["lower_s"] * (1 - 1e-9) <= found["exact_s"] <= found["upper_s"] * (1 + 1e-9)
    used = [server for chain in found["chains"] for server in chain["servers"]]
    assert len(used) == len(set(used))
    assert len(used) + len(found["unused_servers"]) == 20
    for chain in found["chains"]:
        assert sum(chain["blocks"]) == 70
        assert chain["service_rate"] == pytest.approx(1 / chain["service_s"])
    for held in found["memory"]:
        assert held["weights_bytes"] + held["kv_bytes"] <= held["usable_bytes"]
    total = sum(chain["slots"] * chain["service_rate"] for chain in found["chains"])
    assert found["unstable_above"] == pytest.approx(total)
    assert found["overlapping"]["unstable_above"] >= found["unstable_above"] * 0.9


def test_times_are_those_of_the_paper(ask: Ask) -> None:
    """One server that holds all: prompt by compute, tokens by bandwidth, a hop for each."""
    one = BLOOM + FAST.replace("memory_gb = 40", "memory_gb = 200") + "rtt_s = 0.04\n"
    found = ask(one, "--rate", "0.001")

    (chain,) = found["chains"]
    prompt_s = 2000 * 5e9 / 120e12
    tokens_s = 19 * (1.32e9 + 2010 * 57344) / 1020e9
    assert chain["service_s"] == pytest.approx(70 * (1e-3 + prompt_s + tokens_s) + 20 * 0.0405)
    assert chain["slots"] == (200_000_000_000 - 70 * 1_320_000_000) // (2032 * 57344) // 70


def test_prompts_activations_take_their_time_on_the_way(ask: Ask) -> None:
    sized = BLOOM.replace("blocks = 70", "blocks = 70\nhidden_bytes = 28672")
    one = sized + FAST.replace("memory_gb = 40", "memory_gb = 200")

    near, far = (ask(one + more, "--rate", "0.001") for more in ("", "network_gbit_s = 1\n"))
    more_s = far["chains"][0]["service_s"] - near["chains"][0]["service_s"]
    assert more_s == pytest.approx(2000 * 28672 * 8 / 1e9)


def test_ends_take_memory_of_the_servers_that_have_them(ask: Ask) -> None:
    ends = TWENTY.replace("blocks = 70", "blocks = 70\nfirst_gb = 3\nlast_gb = 5")
    found = ask(ends, "--rate", "0.2")

    by_worker: dict[str, list[dict[str, Any]]] = {}
    for held in found["memory"]:
        by_worker.setdefault(held["worker"], []).append(held)
        assert held["weights_bytes"] + held["kv_bytes"] <= held["usable_bytes"]
    for stages in by_worker.values():
        extra = [held["weights_bytes"] - held["blocks"] * 1_320_000_000 for held in stages]
        assert extra == [3_000_000_000, *[0] * (len(stages) - 2), 5_000_000_000]


def test_where_ends_cannot_be_told_every_server_is_charged(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = TWENTY.replace("blocks = 70", "blocks = 70\nfirst_gb = 3\nlast_gb = 5")
    told = ask(ends, "--rate", "0.2")
    monkeypatch.setattr("loadgen.planner.planned._ROUNDS", 1)
    untold = ask(ends, "--rate", "0.2")

    assert untold["unstable_above"] < told["unstable_above"]
    for held in untold["memory"]:
        assert held["weights_bytes"] + held["kv_bytes"] <= held["usable_bytes"]


def test_a_rate_too_high_says_by_how_much_and_what_would_do(
    evenstep: Run, write: Callable[[str], str], ask: Ask
) -> None:
    found = ask(TWENTY, "--rate", "3")

    assert not found["stable"]
    assert {found[key] for key in ("lower_s", "exact_s", "upper_s")} == {None}
    lower, shorter, fast, slow = found["remedies"]
    assert lower == f"a rate below {found['sustained_rate']:.4g} requests/s"
    assert "shorter" in shorter
    for remedy, table in ((fast, FAST), (slow, SLOW)):
        more, _, kind = remedy.partition(" more like ")
        added = f"{table.replace(kind, 'new')}count = {more}\nrtt_s = 0.04\n"
        again = ask(TWENTY + added, "--rate", "3")
        assert (again["stable"], again["remedies"]) == (True, [])
    _, told, _ = evenstep("plan", "--config", write(TWENTY), "--rate", "3")
    assert "unstable, requests pile up" in told
    assert f"short by {3 - found['unstable_above']:.4g} requests/s" in told


def test_prompts_that_take_all_the_compute_are_said(ask: Ask) -> None:
    lean = TWENTY.replace("tflops = 120", "tflops = 12").replace("tflops = 80", "tflops = 8")
    found = ask(lean.replace("rtt_s = 0.04", "rtt_s = 0"), "--rate", "0.3")

    assert found["sustained_rate"] < found["unstable_above"]
    assert any("prompts alone" in line for line in found["cautions"])


def test_below_the_rate_that_would_do_it_does(ask: Ask) -> None:
    """Chains that memory alone would choose leave prompts too few GPUs at .7 of that rate."""
    lean = TWENTY.replace("tflops = 120", "tflops = 12").replace("tflops = 80", "tflops = 8")
    lean = lean.replace("rtt_s = 0.04", "rtt_s = 0").replace("count = 4", "count = 6")
    assert ask(lean, "--rate", "1")["remedies"][0] == "a rate below 0.2 requests/s"
    for rate in (0.19, 0.14, 0.08):
        found = ask(lean, "--rate", str(rate))
        assert found["sustained_rate"] > rate
        assert found["remedies"] == []
        assert 0 < found["lower_s"] <= found["upper_s"]


def test_requests_longer_than_the_model_takes_are_said(ask: Ask) -> None:
    limited = TWENTY.replace("blocks = 70", "blocks = 70\nmax_tokens = 2_020")
    assert not any("longer than" in line for line in ask(limited, "--rate", "0.2")["cautions"])
    again = ask(limited.replace("output_tokens = 20", "output_tokens = 21"), "--rate", "0.2")
    assert any("2,021 tokens" in line for line in again["cautions"])


def test_a_model_that_does_not_fit_says_what_would_hold_it(
    evenstep: Run, write: Callable[[str], str]
) -> None:
    code, _, told = evenstep(
        "plan", "--config", write(f"{BLOOM}{SLOW}count = 3\n"), "--rate", "0.01"
    )

    assert code == 2
    assert "GB more" in " ".join(told.split())
    assert "3 more like slow" in " ".join(told.split())


def test_what_is_written_goes_together(
    evenstep: Run, write: Callable[[str], str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "chain-99.sh").touch()
    code, told, error = evenstep(
        *("plan", "--config", write(TWENTY), "--rate", "0.2", "--out", str(out))
    )
    assert code == 0, error
    assert "no server, as engines of vLLM cannot" in told
    assert "scripts of another plan, too: chain-99.sh" in told

    plan = json.loads((out / "plan.json").read_text())
    router = tomllib.loads((out / "router.toml").read_text())
    assert router["policy"] == "jffc"
    for chain, worker in zip(plan["chains"], router["workers"], strict=True):
        assert (worker["id"], worker["url"]) == (chain["worker"], chain["url"])
        assert worker["slots"] == chain["slots"]
        assert worker["service_rate"] == pytest.approx(chain["service_rate"], rel=1e-5)
        script = (out / f"{chain['worker']}.sh").read_text()
        partition = ",".join(map(str, chain["blocks"]))
        assert f"export VLLM_PP_LAYER_PARTITION={partition}\n" in script
        assert f"--pipeline-parallel-size {len(chain['blocks'])} \\" in script
        assert f"--max-num-seqs {chain['slots']} \\" in script
    assert (out / "placement.png").read_bytes().startswith(b"\x89PNG")


def test_one_kv_size_gives_every_stage_the_same_blocks(ask: Ask) -> None:
    """What vLLM does: a stage's blocks are its bytes over those of a block in its layers."""
    found = ask(TWENTY, "--rate", "0.2")

    for chain in found["chains"]:
        of_a_block = 16 * 57344
        blocks = [
            chain["kv_cache_memory_bytes"] // (of_a_block * layers) for layers in chain["blocks"]
        ]
        assert min(blocks) == chain["slots"] * -(-2020 // 16) + 1


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        (("a", "a", "a", "a"), [("a", "0,1,2,3")]),
        (("a", "a", "b", "b"), [("b", "0,1"), ("a", "0,1")]),
        (("a", "b", "b", "b"), [("b", "2"), ("b", "1"), ("b", "0"), ("a", "0")]),
    ],
)
def test_commands_of_a_chain_over_hosts(
    ask: Ask, hosts: tuple[str, ...], nodes: list[tuple[str, str]]
) -> None:
    # Some difference in speed fixes the order of the stages.
    tables = "".join(
        FAST.replace("fast", f"s{n}").replace("1020", str(1020 - n)) + f'host = "{host}"\n'
        for n, host in enumerate(hosts)
    )
    (chain,) = ask(BLOOM + tables, "--rate", "0.05")["chains"]

    commands = chain["commands"]
    placed = [(each["host"], each["environment"]["CUDA_VISIBLE_DEVICES"]) for each in commands]
    assert placed == nodes
    assert chain["url"] == "http://a:8001"
    for number, each in enumerate(reversed(commands)):
        arguments = each["arguments"]
        assert ("--headless" in arguments) == (number > 0)
        if len(nodes) > 1:
            at = arguments.index("--node-rank")
            assert arguments[at + 1] == str(number)
            assert arguments[arguments.index("--nnodes") + 1] == str(len(nodes))
            assert arguments[arguments.index("--master-addr") + 1] == "a"


def test_chains_of_one_host_have_ports_and_devices_of_their_own(ask: Ask) -> None:
    big = FAST.replace("memory_gb = 40", "memory_gb = 400")
    eased = BLOOM.replace("reserve_gb = 0", "reserve_gb = 0\nload = 0.001")
    found = ask(f"{eased}{big}count = 3\n", "--rate", "0.5")

    assert [chain["url"] for chain in found["chains"]] == [
        f"http://127.0.0.1:{port}" for port in (8001, 8002, 8003)
    ]
    devices = [c["commands"][0]["environment"]["CUDA_VISIBLE_DEVICES"] for c in found["chains"]]
    assert sorted(devices) == ["0", "1", "2"]
    assert all(
        "VLLM_PP_LAYER_PARTITION" not in c["commands"][0]["environment"] for c in found["chains"]
    )


def test_mig_slices_in_one_chain_are_warned_of(
    evenstep: Run, write: Callable[[str], str], tmp_path: Path
) -> None:
    slices = '[[servers]]\nname = "mig"\ngpu = "a100-80gb-sxm/3g.40gb"\ncount = 3\n'
    named = f'{slices}devices = ["MIG-1", "MIG-2", "MIG-3"]\n'
    out = tmp_path / "out"
    code, _, error = evenstep(
        *("plan", "--config", write(BLOOM + named), "--rate", "0.01", "--out", str(out))
    )

    assert code == 0, error
    script = (out / "chain-1.sh").read_text()
    assert "MIG slices have no peer-to-peer" in script
    assert "CUDA_VISIBLE_DEVICES=MIG-1,MIG-2,MIG-3\n" in script


def test_the_example_is_planned(evenstep: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "plan")
    config = str(folder / "servers.toml")
    code, told, error = evenstep("plan", "--config", config, "--rate", "0.5")

    assert code == 0, error
    lines = [line.rstrip() for line in told.splitlines()]
    assert [line for line in lines if line not in text_of(PAGE).splitlines()] == []
    code, told, _ = evenstep("plan", "--config", config, "--rate", "0.5", "--trace", "burstgpt")
    assert (code, "trace burstgpt" in told) == (0, True)


def test_presets_name_their_sources(evenstep: Run) -> None:
    code, told, _ = evenstep("plan", "--list-gpus")
    slices = sum(gpu.sliced for gpu in GPUS.values())
    assert f"{len(GPUS) - slices} GPUs and {slices} MIG slices" in words(text_of(PAGE))

    assert code == 0
    lines = told.splitlines()
    for name, gpu in GPUS.items():
        (line,) = (each for each in lines if each.split(" ")[0] == name)
        assert gpu.source in line


def test_a_slice_has_its_share() -> None:
    """The paper's two kinds are comparable with slices 3g.40gb and 2g.20gb of an A100."""
    fast, slow = GPUS["A100-80GB-SXM/3g.40gb"], GPUS["A100-80GB-SXM/2g.20gb"]

    assert (fast.memory_gb, slow.memory_gb) == (40, 20)
    assert fast.tflops == pytest.approx(120, rel=0.02)
    assert slow.tflops == pytest.approx(80, rel=0.02)
    assert fast.bandwidth_gb_s == pytest.approx(1020, rel=0.01)
    assert slow.bandwidth_gb_s == pytest.approx(510, rel=0.01)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("blocks = 70", "", "[model] has no config, and no blocks"),
        ("blocks = 70", 'blocks = 70\nconfig = "x"', "[model] has config and blocks"),
        ("blocks = 70", "block = 70", "[model]: unknown key 'block'; did you mean blocks?"),
        ("blocks = 70", "blocks = 0", "[model]: blocks = 0 should be greater than or equal to 1"),
        ("tflops = 80", "", "[servers] 2 has no tflops and no gpu that would say it"),
        ("tflops = 80", "tflops = -1", "[servers] 2: tflops = -1 should be greater than 0"),
        ("block_gb = 1.32", "block_gb = 1e15", "block_gb = 1000000000000000.0 should be less"),
        ("tflops = 80", 'tflops = 80\nhost = "a b"', "[servers] 2 host 'a b' should be a name"),
        ("tflops = 80", "tflops = 80\ndevices = [1]", "[servers] 2 has 1 devices for count = 16"),
        ("tflops = 80", 'tflops = 80\ngpu = "A101-40GB"', "did you mean A100-40GB?"),
        ("tflops = 80", 'tflops = 80\ngpu = "h200"', "did you mean H200-SXM or H200-NVL?"),
        ("tflops = 80", "tflops = 80\ndevices = 5", "[servers] 2: devices = 5 should be a valid"),
        ("[workload]", "[[workload]]", "[workload] should be a table: write [workload]"),
        ("count = 16", "count = 2\ndevices = [7, 3]", "fast-3 and slow-1 are both device 3 of"),
        ("reserve_gb = 0", 'kv_cache_dtype = "fp9"', "'fp9' should match"),
        ('name = "slow"', 'name = "fast"', "two servers are called 'fast-0'"),
        ('name = "slow"', "", "[servers] 2: name is missing"),
        ("count = 16", "count = 9999", "10003 servers are more than 10000"),
        ("output_tokens = 20", "", "no lengths: give --trace, or input_tokens and output_tokens"),
        ("[workload]", "[workloads]", "unknown key 'workloads'; did you mean workload?"),
        ("[workload]", "[workload", "is not TOML"),
    ],
)
def test_mistakes_in_the_file_are_said(
    evenstep: Run, write: Callable[[str], str], old: str, new: str, told: str
) -> None:
    assert old in TWENTY
    code, _, error = evenstep("plan", "--config", write(TWENTY.replace(old, new, 1)), "--rate", "1")

    assert code == 2
    assert told in " ".join(error.split())


def test_mistakes_on_the_command_line_are_said(
    evenstep: Run, write: Callable[[str], str], tmp_path: Path
) -> None:
    code, _, error = evenstep("plan", "--config", write(TWENTY), "--rate", "0")
    assert (code, "--rate must be above 0" in error) == (2, True)
    code, _, error = evenstep("plan", "--config", str(tmp_path / "none.toml"), "--rate", "1")
    assert (code, "No such file" in error) == (2, True)
    code, _, error = evenstep(
        *(
            "plan",
            "--config",
            write(TWENTY),
            "--rate",
            "0.1",
            "--out",
            str(tmp_path / "servers.toml"),
        )
    )
    assert (code, "--out: cannot write" in error) == (2, True)


def test_slots_smaller_than_makes_sense_are_not_counted_one_by_one(ask: Ask) -> None:
    tiny = TWENTY.replace("kv_bytes_per_token = 57344", "kv_bytes_per_token = 0.001")
    found = ask(tiny, "--rate", "0.2")

    assert found["parameters"]["slot_bytes"] == 40_000_000_000 // 200_000
    assert found["stable"]
