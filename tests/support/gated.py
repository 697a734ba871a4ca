"""Admission in front of a scheduler that is not vLLM's."""

from types import SimpleNamespace
from typing import Any

from engine_patches.admission import read_admission
from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.entrance import Entrance
from engine_patches.plugin.gate import AdmissionGate
from tests.support.plugin_engine import FakeScheduler, Request


class Gated:
    """A scheduler of 8 slots and 25 blocks of 4 tokens, whose steps a gate decides on."""

    def __init__(
        self,
        slots: int = 8,
        ahead: int = 0,
        step_tokens: int = 8192,
        prompt_chunk: int = 0,
        max_loras: int = 0,
        **settings: Any,
    ) -> None:
        self.scheduler = FakeScheduler(slots, chunk=40, blocks=25)
        self.scheduler.lora_config = SimpleNamespace(max_loras=max_loras) if max_loras else None
        self.scheduler.max_num_scheduled_tokens = step_tokens
        self.scheduler.scheduler_config.long_prefill_token_threshold = prompt_chunk
        self.now_s = 0.0
        self.slept: list[float] = []
        self.entrance = Entrance(self.scheduler)
        self.gate = AdmissionGate(
            EngineView(self.scheduler),
            self.entrance,
            read_admission(settings),
            ahead=ahead,
            clock=lambda: self.now_s,
            sleep=self.slept.append,
        )

    def add(self, id_: str, prompt_tokens: int, hint: int | None = None) -> Request:
        request = Request(id_, prompt_tokens)
        if hint is not None:
            request.sampling_params.extra_args = {"evenstep_predicted_tokens": hint}
        self.scheduler.add_request(request)
        self.gate.arrived(request)
        return request

    def step(self, *ending: str, preempt: tuple[str, ...] = ()) -> list[str]:
        """Who runs in it."""
        self.gate.open()
        try:
            output = self.scheduler.schedule(preempt=preempt)
        finally:
            self.gate.close()
        self.gate.scheduled(output)
        running = [one.request_id for one in self.scheduler.running]
        self.scheduler.update_from_output(output, ending)
        return running
