"""One emulated worker: its engine, its running answers, and its fault, if any."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence

from loadgen.emulator.answer import Answer, Choice
from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.emulator.faults import Fault, Wire
from loadgen.emulator.generation import Generation
from loadgen.emulator.kv_events import KvEvents
from loadgen.emulator.named_shapes import MessageShape, ResponseShape
from loadgen.emulator.operated import Operated
from loadgen.emulator.prompt_content import Content
from loadgen.emulator.shapes import CHAT, COMPLETION, Shape
from loadgen.emulator.state_stream import StateStream
from loadgen.emulator.timer import engine_now_s
from loadgen.emulator.transfer_params import KvTransfer, kept_params
from loadgen.engine.engine import Engine
from loadgen.engine.kv_handoff import Fetch, KeptKv
from loadgen.engine.request import EngineRequest
from loadgen.engine.stepping import WorkerModel, WorkerStep
from router.core.step_time import StepBudget


class EmulatedWorker:
    """The engine side of one worker; ``app`` does HTTP, ``stepper`` does time.

    ``kept`` is the KV that every engine of the fleet keeps, by engine id.
    """

    def __init__(
        self,
        rank: int,
        settings: EmulatorSettings,
        stream: StateStream,
        kept: dict[str, KeptKv],
    ) -> None:
        self.rank = rank
        self.settings = settings
        self.stream = stream
        self.engine_id = ""  # new at every start
        self._kept = kept
        self._told_tokens = 0
        port, size = settings.kv_events_port, settings.features.block_tokens
        endpoint = None if port is None else f"tcp://127.0.0.1:{port + rank}"
        self.kv_events = KvEvents(endpoint, rank, size, self._content)
        self.model = WorkerModel(rank, self._new_engine(), settings.speed(rank))
        self.fault: Fault | None = None
        self.prompt_tokens_total = 0
        # The last step that it took part in, counted from its start as an engine does.
        self.step = self._steps_before = 0
        self._restarted = False
        self.operated = Operated()
        # Callback for new work, less work, and faults that begin or end.
        self.on_change: Callable[[], None] = lambda: None
        self._choices: dict[str, Choice] = {}
        # A step under way may have stored blocks of them.
        self._abandoned: dict[str, Choice] = {}
        self._ended: list[str] = []
        self._answering = asyncio.Event()
        self._answering.set()

    @property
    def hung(self) -> bool:
        return self.fault is not None and self.fault.kind == "hang"

    @property
    def stalls(self) -> bool:
        """Whether those that step with it have to wait for it."""
        return self.hung or (self.settings.lockstep and not self.model.live)

    @property
    def garbled(self) -> bool:
        return self.fault is not None and self.fault.kind == "garbage"

    @property
    def answers(self) -> list[Answer]:
        by_identity = {id(choice.answer): choice.answer for choice in self._choices.values()}
        return list(by_identity.values())

    def bound_prompts(self, budget: StepBudget, step: int) -> None:
        """Keep a step to a budget of routers besides the worker's own."""
        own = self.settings.features.prompt_budget
        self.model.prompt_budget, tokens = budget.tokens, budget.at(step)
        self.model.engine.prompt_budget = min(own or tokens, tokens) if budget.tokens else own

    async def until_answering(self) -> None:
        await self._answering.wait()

    def submit(self, generation: Generation, x_request_id: str, wire: Wire) -> Answer:
        """Queue the engine requests, named as in vLLM."""
        prefix = "chatcmpl" if generation.chat else "cmpl"
        answer_id = generation.name or f"{prefix}-{x_request_id}"
        answer = Answer(generation, self._shape(generation, answer_id), wire)
        for prompt, tokens in enumerate(generation.prompt_tokens):
            parent = answer_id if generation.chat else f"{answer_id}-{prompt}"
            parent = f"{parent}-{uuid.uuid4().hex[:8]}"
            self.prompt_tokens_total += tokens
            fetch = self._fetch(generation.kv_transfer)
            for child in range(generation.n):
                request_id = parent if generation.n == 1 else f"{child}_{parent}"
                self._add(answer, request_id, prompt * generation.n + child, fetch)
        self.on_change()
        return answer

    def abandon(self, answer: Answer) -> None:
        """Its client has disconnected."""
        answer.abandon()
        for choice in answer.choices:
            request_id = choice.request.id
            if self._choices.get(request_id) is choice:
                del self._choices[request_id]
                self._abandoned[request_id] = choice
                self.model.engine.abort(request_id)
                self._ended.append(request_id)
        self.on_change()

    def fail(self, request_ids: Sequence[str]) -> None:
        """Fail the answers of failed engine requests.

        Their other outputs end too: the sender of a failed answer abandons it, which aborts the
        rest.
        """
        for request_id in request_ids:
            choice = self._choices.pop(request_id, None)
            if choice is not None:
                choice.answer.fail()

    def report_step(
        self, part: WorkerStep, ended: list[EngineRequest], step: int, step_s: float
    ) -> None:
        if self._restarted:
            self._steps_before, self._restarted = step - 1, False
        self.step = step - self._steps_before
        finished = [*self._take_ended(), *part.schedule.failed]
        finished += [request.id for request in ended]
        self._told_tokens = part.engine.used_tokens
        self._tell_cache()
        entered = [self._choices.get(id_) for id_ in part.schedule.admitted]
        self.stream.note_entered([one.request for one in entered if one is not None])
        waited_s = step_s - part.needed_s if self.settings.time_waits else None
        self.stream.report_step(part, self.step, (step_s, waited_s), finished, ended)

    def reset_prefix_cache(self) -> bool:
        """False: memory is in use."""
        done = self.model.engine.reset_prefix_cache()
        self._tell_cache()
        return done

    def report_rest(self) -> None:
        finished = self._take_ended()
        self._told_tokens = self.model.engine.used_tokens
        self._tell_cache()
        self.stream.report_rest(self.model, self.step, finished)

    def beat(self) -> None:
        """Between steps: free expired KV, and send a heartbeat if it is due."""
        engine = self.model.engine
        if self.model.live and not self.hung:
            engine.kept.expire(engine_now_s(self.settings.time_scale))
            if engine.used_tokens != self._told_tokens and not engine.unfinished:
                self.report_rest()
        self.stream.beat()

    def show_tokens(self, ended: list[EngineRequest]) -> None:
        """Pass the tokens of a step to their answers.

        The rhythm is that of vLLM's ``--stream-interval``: the first token at once, then every
        interval, and the last ones at the end.
        """
        interval = self.settings.stream_interval
        for request in self.model.engine.batch:
            if request.prefill_left:
                continue
            choice = self._choices[request.id]
            if choice.answer.generation.stream:
                shown = choice.shown_tokens
                if shown == 0 or request.generated_tokens - shown >= interval:
                    choice.answer.show(choice, done=False)
        for request in ended:
            choice = self._choices.pop(request.id)
            if request.keeps_kv and choice.index == 0:
                choice.answer.kv_transfer_params = kept_params(
                    self.engine_id,
                    request.id,
                    request.peak_tokens,
                    host=self.settings.host,
                    rank=self.rank,
                )
            choice.answer.show(choice, done=True)

    def take_fault(self, fault: Fault) -> None:
        """Start a fault, as far as it affects the engine and the state stream."""
        self.fault = fault
        if fault.kind == "hang":
            self._answering.clear()
            self.stream.silence()
        elif fault.kind == "slow":
            self.model.speed = self.settings.speed(self.rank) / fault.factor
        elif fault.kind == "kill":
            self.model.live = False
            self.model.engine.die(engine_now_s(self.settings.time_scale))
            del self._kept[self.engine_id]
            self.model.engine = self._new_engine()
            self._restarted = True
            self.prompt_tokens_total = 0
            self._choices.clear()
            self._abandoned.clear()
            self._ended.clear()
            self.stream.stop()
            self.kv_events.stop()
        self.on_change()

    async def recover(self) -> None:
        """End the fault; a killed engine restarts empty."""
        fault, self.fault = self.fault, None
        self.model.speed = self.settings.speed(self.rank)
        self._answering.set()
        if fault is not None and fault.kind == "kill":
            await self.stream.start(self.model)
            await self.kv_events.start()
        elif fault is not None and fault.kind == "hang":
            self.stream.resume()
        self.model.live = True
        self.on_change()

    def release(self) -> None:
        """Release requests that a hang blocks; they then find their connections closed."""
        self._answering.set()

    def _add(self, answer: Answer, request_id: str, index: int, fetch: Fetch | None) -> None:
        generation = answer.generation
        prompt = index // generation.n
        plan = generation.plans[index]
        transfer = generation.kv_transfer if self.settings.prefill is not None else None
        request = EngineRequest(
            id=request_id,
            prompt_tokens=generation.prompt_tokens[prompt],
            output_tokens=plan.output_tokens,
            priority=generation.priority,
            keeps_kv=transfer is not None and transfer.keeps,
            fetch=fetch,
            cap_tokens=generation.caps[prompt],
            hint_tokens=generation.predicted_tokens,
            arrived_s=engine_now_s(self.settings.time_scale),
            chain=generation.chains[prompt],
        )
        choice = Choice(answer, index, request, plan)
        answer.choices.append(choice)
        self._choices[request_id] = choice
        self.model.engine.add(request)

    def _fetch(self, transfer: KvTransfer | None) -> Fetch | None:
        """A fleet without prefill settings has no connector."""
        prefill = self.settings.prefill
        if prefill is None or transfer is None or not transfer.fetches:
            return None
        return Fetch(
            self._kept.get(transfer.engine_id),
            transfer.request_id,
            prefill.transfer,
            engine_now_s(self.settings.time_scale),
        )

    def _shape(
        self, generation: Generation, answer_id: str
    ) -> Shape | MessageShape | ResponseShape:
        model, created = self.settings.model, int(time.time())
        if generation.form == "message":
            return MessageShape(answer_id, model, sum(generation.prompt_tokens))
        if generation.form == "response":
            return ResponseShape(answer_id, model, created)
        return Shape(CHAT if generation.chat else COMPLETION, answer_id, model, created)

    def _content(self, request_id: str) -> Content | None:
        choice = self._choices.get(request_id) or self._abandoned.get(request_id)
        if choice is None:
            return None
        generation = choice.answer.generation
        return generation.contents[choice.index // generation.n]

    def _tell_cache(self) -> None:
        cache = self.model.engine.prefix_cache
        events = [] if cache is None else cache.take_events()
        self.stream.note_cache(events)
        self.kv_events.publish(events)
        self._abandoned.clear()

    def _take_ended(self) -> list[str]:
        ended, self._ended = self._ended, []
        return ended

    def _new_engine(self) -> Engine:
        engine = self.settings.new_engine(self.rank)
        self.engine_id = uuid.uuid4().hex
        self._kept[self.engine_id] = engine.kept
        return engine
