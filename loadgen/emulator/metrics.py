"""``/metrics`` of a worker, under vLLM's names."""

from loadgen.emulator.emulated_worker import EmulatedWorker
from loadgen.emulator.stepper import Lateness
from loadgen.engine.engine import Engine
from loadgen.engine.prefix_cache import PrefixCache


def render_metrics(worker: EmulatedWorker, lateness: Lateness) -> bytes:
    """Prometheus text of one worker; a kill resets its counters."""
    engine = worker.model.engine
    model = worker.settings.model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    labels = f'engine="{worker.rank}",model_name="{model}"'
    (group, *_) = engine.kv_groups
    caching = engine.prefix_cache or PrefixCache()
    cache = (
        f'block_size="{group.block_size}",'
        f'enable_prefix_caching="{engine.prefix_cache is not None}",'
        f'num_gpu_blocks="{group.blocks_total}"'
    )
    blocks = [
        _block("gauge", "vllm:num_requests_running", labels, len(engine.running)),
        _block("gauge", "vllm:num_requests_waiting", labels, engine.waiting),
        _block("gauge", "vllm:kv_cache_usage_perc", labels, engine.used_tokens / engine.kv_tokens),
        _block("gauge", "vllm:cache_config_info", f"{labels},{cache}", 1),
        _block("counter", "vllm:num_preemptions_total", labels, engine.preemptions_total),
        _block("counter", "vllm:prefix_cache_queries_total", labels, caching.queried_tokens),
        _block("counter", "vllm:prefix_cache_hits_total", labels, caching.hit_tokens),
        _block("counter", "vllm:prompt_tokens_total", labels, worker.prompt_tokens_total),
        _block("counter", "vllm:generation_tokens_total", labels, engine.generated_total),
        _block("counter", "vllm:nixl_num_kv_expired_reqs_total", labels, engine.kept.expired_total),
        _block(
            "counter", "vllm:nixl_num_failed_transfers_total", labels, engine.transfers.failed_total
        ),
        _block("gauge", "evenstep_emulator_kept_kv_tokens", labels, engine.kept.tokens),
        _block("gauge", "evenstep_emulator_time_scale", labels, worker.settings.time_scale),
        "# TYPE evenstep_emulator_kv_handoff_total counter\n",
        *(
            f'evenstep_emulator_kv_handoff_total{{{labels},event="{event}"}} {float(total)}\n'
            for event, total in handoff_totals(engine).items()
        ),
        "# TYPE evenstep_emulator_step_lateness_ratio gauge\n",
    ]
    for quantile, value in (
        ("0.5", lateness.quantile(0.5)),
        ("0.99", lateness.quantile(0.99)),
        ("1", lateness.max),
    ):
        quantile_labels = f'{labels},quantile="{quantile}"'
        blocks.append(f"evenstep_emulator_step_lateness_ratio{{{quantile_labels}}} {value:.6g}\n")
    return "".join(blocks).encode()


def handoff_totals(engine: Engine) -> dict[str, int]:
    """KV handoffs since the engine's start: KV it kept, and fetches that failed."""
    kept = engine.kept
    return {
        "prefilled": kept.kept_total,
        "fetched": kept.fetched_total,
        "freed": kept.freed_total,
        "expired": kept.expired_total,
        "failed_loads": engine.transfers.failed_total,
    }


def _block(kind: str, name: str, labels: str, value: float) -> str:
    return f"# TYPE {name} {kind}\n{name}{{{labels}}} {float(value)}\n"
