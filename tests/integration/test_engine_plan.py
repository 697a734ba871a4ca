"""What ``evenstep plan`` writes is what vLLM reads: its own parser, and its own partition."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.planner.plan_file import load_config, machines, model_numbers
from loadgen.planner.planned import planned
from loadgen.planner.question import Lengths, Question
from loadgen.planner.vllm import Launch, engines
from tests.support.engine import ENVIRONMENT, READY_S, Installation
from tests.support.server import free_port, starting, wait_ready

pytestmark = pytest.mark.engine

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]

# Prints, of each list of arguments, what vLLM makes of it; parsing starts no engine.
_PARSE = """
import json, sys
from vllm.distributed.utils import get_pp_indices
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
import os
parser = FlexibleArgumentParser()
command = ServeSubcommand().subparser_init(parser.add_subparsers())
found = []
for given in json.loads(sys.argv[1]):
    parsed = parser.parse_args(given["arguments"])
    partition = given["environment"].get("VLLM_PP_LAYER_PARTITION")
    os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
    if partition is not None:
        os.environ["VLLM_PP_LAYER_PARTITION"] = partition
    size = parsed.pipeline_parallel_size
    layers = [get_pp_indices(given["layers"], rank, size) for rank in range(size)]
    names = ("model_tag", "port", "pipeline_parallel_size", "max_num_seqs", "max_model_len",
             "block_size", "kv_cache_memory_bytes", "gpu_memory_utilization", "kv_cache_dtype",
             "nnodes", "node_rank", "master_addr", "headless", "distributed_executor_backend")
    found.append({name: getattr(parsed, name) for name in names} | {"layers": layers})
print("parsed", json.dumps(found))
"""

_SERVERS = """
[model]
name = "some/model"
blocks = 70
block_gb = 1.32
kv_bytes_per_token = 57344
flops_per_token = 5e9

[engine]
kv_cache_dtype = "fp8"

[[servers]]
name = "one"
gpu = "B200"
host = "10.0.0.1"

[[servers]]
name = "two"
gpu = "H100-SXM"
host = "10.0.0.2"

[[servers]]
name = "three"
gpu = "A100-80GB-SXM"
host = "10.0.0.3"
"""


def _parsed(where: Installation, launches: list[Launch], layers: int) -> list[dict[str, Any]]:
    given = [
        {"arguments": each.arguments, "environment": dict(each.environment), "layers": layers}
        for each in launches
    ]
    name = str(where.venv / "vllm-name")
    done = subprocess.run(
        [str(where.python), "-c", _PARSE, json.dumps(given)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**ENVIRONMENT, "PYTHONPATH": name},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("parsed "))
    found: list[dict[str, Any]] = json.loads(line.removeprefix("parsed "))
    return found


# The tiny model, whose two layers and ends no server has the memory for.
_TINY = """
[model]
name = "{model}"
config = "{model}"

[workload]
input_tokens = 100
output_tokens = 50
slot_tokens = 256

[engine]
block_size = 32
reserve_gb = 0
port = {port}
master_port = {master_port}

[[servers]]
name = "one"
memory_gb = 0.00022
bandwidth_gb_s = 10
tflops = 0.1
host = "127.0.0.1"

[[servers]]
name = "two"
memory_gb = 0.00022
bandwidth_gb_s = 9
tflops = 0.1
host = "localhost"
"""


@pytest.mark.slow
def test_scripts_start_a_chain_with_the_kv_cache_that_was_planned(
    evenstep: Run, engine_installation: Installation, tmp_path: Path
) -> None:
    """Two nodes of one chain. The CPU engine cannot compute in a pipeline, but it sets one up."""
    model, port = engine_installation.model, free_port()
    file, out = tmp_path / "servers.toml", tmp_path / "out"
    file.write_text(_TINY.format(model=model, port=port, master_port=free_port()))
    code, _, error = evenstep("plan", "--config", str(file), "--rate", "0.1", "--out", str(out))
    assert code == 0, error
    (chain,) = json.loads((out / "plan.json").read_text())["chains"]
    assert chain["blocks"] == [1, 1]

    # What a script calls.
    command = tmp_path / "vllm"
    serve = f"{engine_installation.python} {ROOT / 'deploy' / 'engine' / 'serve.py'}"
    command.write_text(f'#!/bin/sh\nshift\nexec {serve} "$@"\n')
    command.chmod(0o755)
    # The KV cache's size in the environment would win over the script's.
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "VLLM_CPU_KVCACHE_SPACE"} | {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(engine_installation.venv / "vllm-cache"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    with contextlib.ExitStack() as stack:
        second, head = (
            stack.enter_context(
                starting(
                    [str(out / f"chain-1-node-{node}.sh"), "--enforce-eager", "--host=127.0.0.1"],
                    port,
                    tmp_path / f"node-{node}.log",
                    environment,
                )
            )
            for node in (1, 0)
        )
        wait_ready(head, READY_S)
        info = next(
            line for line in head.get("/metrics").text.splitlines() if "cache_config_info{" in line
        )
        assert second.alive, second.log_tail()
    assert f'num_gpu_blocks="{chain["slots"] * 256 // 32 + 1}"' in info
    assert "PP rank 0" in head.log.read_text()
    assert "PP rank 1" in second.log.read_text()


def test_vllm_parses_the_commands(engine_installation: Installation, tmp_path: Path) -> None:
    file = tmp_path / "servers.toml"
    file.write_text(_SERVERS)
    config = load_config(file)
    lengths = Lengths(2000, 20, 2020, "as stated")
    numbers = model_numbers(config, tmp_path)
    question = Question(numbers, lengths, config.engine, config.times, machines(config), 1.0)
    plan = planned(question)
    chains = engines(plan, config.model.name)

    launches = [(chain, launch) for chain in chains for launch in chain.launches]
    assert {launch.nodes for _, launch in launches} == {1, 2}
    found = _parsed(engine_installation, [launch for _, launch in launches], 70)
    for (chain, launch), parsed in zip(launches, found, strict=True):
        sizes = [stop - start for start, stop in parsed.pop("layers")]
        assert sizes == list(chain.chain.blocks)
        assert parsed == {
            "model_tag": "some/model",
            "port": chain.port,
            "pipeline_parallel_size": len(chain.stages),
            "max_num_seqs": chain.chain.slots,
            "max_model_len": chain.max_model_len,
            "block_size": 16,
            "kv_cache_memory_bytes": chain.kv_cache_bytes,
            "gpu_memory_utilization": 0.92,
            "kv_cache_dtype": "fp8",
            "nnodes": launch.nodes,
            "node_rank": launch.node,
            "master_addr": chain.stages[0].host if launch.nodes > 1 else "127.0.0.1",
            "headless": launch.node > 0,
            "distributed_executor_backend": "mp" if launch.nodes > 1 else None,
        }
