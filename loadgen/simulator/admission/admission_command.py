"""``evenstep simulate admission``: one engine under KV pressure, one admission policy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from rich.console import Console, RenderableType

from engine_patches.admission import ADMISSIONS, DEFAULT, AdmissionRow
from engine_patches.admission.settings import AdmissionSettings, known_names
from loadgen.model.measured_step_time import load_step_time
from loadgen.report.numbers import figures_with_notes
from loadgen.run.admission_options import admission_settings, parse_object, told_warnings
from loadgen.run.options import JsonFlag, command_of, same_named, step_time_option
from loadgen.simulator.admission.admission_results import WARMUP_SHARE, AdmissionResult
from loadgen.simulator.admission.admission_simulation import (
    AdmissionConfig,
    EvictionKind,
    Order,
    simulate_admission,
)
from loadgen.simulator.admission.predictions import Prediction
from loadgen.simulator.admission.scenarios import SCENARIOS, Scenario, scenario_of
from router.commands.json_output import STDOUT, write_json
from router.commands.options import flag
from router.core.errors import ConfigError

_SARATHI_CHUNK = 512
_PREDICTED = ("predict", "margin")


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """Command line of ``evenstep simulate admission``."""

    policy: Annotated[str, flag("Who enters: one of those above.", "P")] = DEFAULT
    settings: Annotated[
        str, flag('The policy\'s settings as in the plug-in: {"headroom": 0.1}.', "JSON")
    ] = "{}"
    scenario: Annotated[str, flag("Engine and requests: one of those above.", "NAME")] = "chat70b"
    rate: Annotated[float | None, flag("Requests per second [the scenario's].", "R")] = None
    requests: Annotated[int | None, flag("How many come [the scenario's].", "N")] = None
    seed: Annotated[int, flag("Of lengths, arrivals and errors.", "S")] = 0
    predict: Annotated[str, flag("What a policy is told of output lengths.", Prediction.FORMS)] = (
        "exact"
    )
    margin: Annotated[float, flag("Share of KV memory left free for errors of lengths.", "M")] = 0.0
    eviction: Annotated[
        EvictionKind, flag("Output kept and its KV recomputed, or all begun anew.")
    ] = EvictionKind.KEEP
    order: Annotated[
        Order,
        flag(
            "Running requests first, as vLLM; in chunks of 512 tokens, as Sarathi; or "
            "steps that only compute prompts, as vLLM before its V1."
        ),
    ] = Order.VLLM
    watermark: Annotated[
        float, flag("vLLM's: share of memory kept free as requests enter.", "W")
    ] = 0.0
    kv_tokens: Annotated[int | None, flag("KV memory [the scenario's].", "N", 1)] = None
    block_size: Annotated[int, flag("Tokens of a KV block; vLLM's are 16.", "N", 1)] = 1
    max_num_seqs: Annotated[
        int | None, flag("Requests that run at once [the scenario's].", "N", 1)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, flag("Tokens that a step computes [the scenario's].", "N", 1)
    ] = None
    step_time: Annotated[str | None, step_time_option("the scenario's")] = None
    free_tokens: Annotated[
        int, flag("KV tokens that cost no time: piecewise linear steps.", "N")
    ] = 0
    json_file: JsonFlag = None

    def config(self) -> AdmissionConfig:
        """Build the configuration from the options."""
        prediction = Prediction.parse(self.predict)
        scenario = scenario_of(self.scenario)
        cost = scenario.cost if self.step_time is None else load_step_time(self.step_time)
        chunk = _SARATHI_CHUNK if self.order is Order.SARATHI else scenario.chunk
        return AdmissionConfig(
            **same_named(self, AdmissionConfig)
            | {
                "settings": self._settings(prediction),
                "scenario": replace(
                    scenario,
                    rate=scenario.rate if self.rate is None else self.rate,
                    requests=scenario.requests if self.requests is None else self.requests,
                    kv_tokens=self.kv_tokens or scenario.kv_tokens,
                    slots=self.max_num_seqs or scenario.slots,
                    chunk=self.max_num_batched_tokens or chunk,
                    cost=cost,
                ),
                "prediction": prediction,
                "block_tokens": self.block_size,
            }
        )

    def _settings(self, prediction: Prediction) -> AdmissionSettings:
        given = parse_object("--settings", self.settings)
        if twice := given.keys() & {"policy", *_PREDICTED}:
            raise ConfigError(f"--settings: give {sorted(twice)[0]} as an option of its own")
        if self.policy not in ADMISSIONS:
            names = known_names(self.policy, list(ADMISSIONS))
            raise ConfigError(f"--policy: there is no policy {self.policy!r}; {names}")
        keys = ADMISSIONS[self.policy].keys
        told: dict[str, object] = {"predict": prediction.setting, "margin": self.margin}
        known = {key: value for key, value in told.items() if key in keys}
        if self.margin and "margin" not in keys:
            raise ConfigError(f"--margin does nothing for --policy {self.policy}")
        if self.margin:
            admission_settings("--margin", {"policy": self.policy, "margin": self.margin})
        return admission_settings("--settings", {"policy": self.policy} | known | given)


@command_of(AdmissionOptions)
def admission(options: AdmissionOptions) -> None:
    """Simulate one engine under KV pressure, and who enters it, in virtual time."""
    with told_warnings():
        result = simulate_admission(options.config())
    console = Console(stderr=options.json_file == STDOUT)
    console.print(_table(result), highlight=False, soft_wrap=True)
    write_json(result.report(), options.json_file)


_ROWS = (
    ("evictions in 1,000 requests", "evictions_per_1k", 1.0),
    ("throughput, tok/s", "throughput_tok_s", 1.0),
    ("throughput, requests/s", "throughput_req_s", 1.0),
    ("latency, s", "latency_mean_s", 1.0),
    ("latency p99, s", "latency_p99_s", 1.0),
    ("latency max, s", "latency_max_s", 1.0),
    ("TTFT, s", "ttft_mean_s", 1.0),
    ("TTFT p99, s", "ttft_p99_s", 1.0),
    ("completed", "completed", 1),
    ("KV used, mean %", "kv_used_mean", 100.0),
    ("KV used, max %", "kv_used_max", 100.0),
    ("step, ms", "step_mean_s", 1e3),
)


def _table(result: AdmissionResult) -> RenderableType:
    used = result.parameters
    notes = (
        f"{used['scenario']}, {used['requests']} requests at {used['rate']:g}/s, seed "
        f"{used['seed']}; {used['kv_tokens']} KV tokens, {used['max_num_seqs']} slots, "
        f"{used['max_num_batched_tokens']} tokens a step",
        f"lengths: {used['prediction']}; eviction: {used['eviction']}; order: {used['order']}; "
        f"the first {WARMUP_SHARE:.0%} of the arrivals are left out",
    )
    return figures_with_notes(str(used["policy"]), notes, (_ROWS, result))


def _listed(title: str, rows: Mapping[str, AdmissionRow] | Mapping[str, Scenario]) -> str:
    lines = (f"  {name:17}{row.summary}" for name, row in rows.items())
    return "\n".join(["\b", f"{title}:", *lines])


admission.__doc__ = "\n\n".join(
    [str(admission.__doc__), _listed("Policies", ADMISSIONS), _listed("Scenarios", SCENARIOS)]
)
