"""A whole emulated fleet in one event loop: workers, ports, step loops, fault port."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from loadgen.emulator.control import ControlApp
from loadgen.emulator.emulated_worker import EmulatedWorker
from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.emulator.faults import Fault
from loadgen.emulator.listener import Listener
from loadgen.emulator.metrics import handoff_totals
from loadgen.emulator.record import RecordWriter
from loadgen.emulator.sent import SentLog
from loadgen.emulator.state_stream import StateStream
from loadgen.emulator.stepper import Lateness, Stepper, step_record
from loadgen.emulator.worker_app import WorkerApp
from loadgen.engine.kv_handoff import KeptKv
from loadgen.engine.stepping import Step

_HEARTBEAT_CHECK_S = 0.25
_TEAR_S = 0.01


class EmulatedFleet:
    """A fleet that runs inside its ``async with`` block."""

    def __init__(self, settings: EmulatorSettings) -> None:
        self.settings = settings
        self.lateness = Lateness()
        self._sent = SentLog(settings.answers)
        kept: dict[str, KeptKv] = {}
        group, endpoints = settings.group, settings.snapshots or (None,) * settings.ranks
        self.workers = [
            EmulatedWorker(
                rank,
                settings,
                StateStream(
                    endpoint,
                    group=group,
                    worker=f"{group}-{rank}",
                    rank=rank,
                    ranks=settings.workers if settings.lockstep and rank < settings.workers else 1,
                ),
                kept,
            )
            for rank, endpoint in enumerate(endpoints)
        ]
        self.listeners = [self._listener(worker) for worker in self.workers]
        self.control = Listener(ControlApp(self), settings.host, settings.fault_port)
        self._record: RecordWriter | None = None
        self._steppers: list[Stepper] = []
        self._prefill_steppers: list[Stepper] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        try:
            settings = self.settings
            if settings.record is not None:
                self._record = RecordWriter(settings.record, settings.workers)
            for worker in self.workers:
                await worker.stream.start(worker.model)
                await worker.kv_events.start()
            for listener in (*self.listeners, self.control):
                await listener.open()
            workers, record = self._answering, self._write_step if self._record else None
            domains = [workers] if settings.barrier else [[worker] for worker in workers]
            self._steppers = [self._stepper(domain, record) for domain in domains]
            prefilling = self.workers[len(workers) :]
            self._prefill_steppers = [self._stepper([worker], None) for worker in prefilling]
            steppers = (*self._steppers, *self._prefill_steppers)
            self._tasks = [asyncio.create_task(stepper.run()) for stepper in steppers]
            self._tasks.append(asyncio.create_task(self._beat()))
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def wait(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set; re-raises the error of a failed step loop."""
        stopped = asyncio.ensure_future(stop.wait())
        done, _ = await asyncio.wait([stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for task in done:
            task.result()

    async def aclose(self) -> None:
        for listener in (*self.listeners, self.control):
            listener.cut()
        for worker in self.workers:
            worker.release()
        for listener in (*self.listeners, self.control):
            await listener.closed()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers:
            worker.stream.stop()
            worker.kv_events.stop()
        if self._record is not None:
            self._record.close()
        self._sent.close()

    def worker_spec(self, rank: int, host: str | None = None) -> str:
        """The value for ``evenstep serve --worker``.

        With a ``host``, this machine's name for a router elsewhere, it has no state stream.
        """
        settings, listener = self.settings, self.listeners[rank]
        url = listener.url if host is None else listener.url_at(host)
        role = ",role=prefill" if settings.prefills(rank) else ""
        spec = f"{url},group={settings.group}{role},rank={rank},slots={settings.slots}"
        if host is None and settings.snapshots:
            return f"{spec},snapshots={settings.snapshots[rank]}"
        if host is None and settings.kv_events_port is not None:
            return f"{spec},kv_events=tcp://127.0.0.1:{settings.kv_events_port + rank}"
        return spec

    def describe(self) -> dict[str, object]:
        return {
            "emulated": True,
            "model": self.settings.model,
            "group": self.settings.group,
            "barrier": self.settings.barrier,
            "time_scale": self.settings.time_scale,
            "engines": self.settings.described(),
            "steps": sum(stepper.group.steps for stepper in self._steppers),
            "prefill_steps": sum(stepper.group.steps for stepper in self._prefill_steppers),
            "lateness": {
                "p50": self.lateness.quantile(0.5),
                "p99": self.lateness.quantile(0.99),
                "max": self.lateness.max,
            },
            "energy_j": sum(worker.model.energy_j for worker in self.workers),
            "workers": [self._describe_worker(rank) for rank in range(len(self.workers))],
        }

    def has_rank(self, rank: int) -> bool:
        return rank < len(self.workers)

    async def inject(self, rank: int, fault: Fault) -> None:
        await self.restore(rank)
        worker, listener = self.workers[rank], self.listeners[rank]
        if fault.kind in ("kill", "refuse"):
            listener.refuse()
        if fault.mid_event and not fault.on_the_wire:
            for answer in worker.answers:
                answer.tear()
        worker.take_fault(fault)
        if fault.mid_event:
            # A reset would overtake the half events in the loop's buffers.
            await asyncio.sleep(_TEAR_S)
        if fault.kind == "kill":
            listener.reset()

    async def restore(self, rank: int) -> None:
        """End a worker's fault; a killed worker comes back empty, as a new epoch."""
        worker = self.workers[rank]
        if worker.fault is not None:
            await worker.recover()
            await self.listeners[rank].open()

    def _stepper(
        self, domain: Sequence[EmulatedWorker], record: Callable[[Step, float, float], None] | None
    ) -> Stepper:
        group = self.settings.step_group([worker.model for worker in domain])
        return Stepper(group, domain, self.settings.time_scale, self.lateness, record)

    @property
    def _answering(self) -> list[EmulatedWorker]:
        return self.workers[: self.settings.workers]

    async def _beat(self) -> None:
        while True:
            for worker in self.workers:
                worker.beat()
            await asyncio.sleep(_HEARTBEAT_CHECK_S)

    def _write_step(self, step: Step, wall_s: float, late: float) -> None:
        if self._record is not None and step.parts:
            barrier = self.settings.barrier
            self._record.write(
                step_record(step, wall_s, late, workers=self._answering, barrier=barrier)
            )

    def _listener(self, worker: EmulatedWorker) -> Listener:
        settings = self.settings
        return Listener(
            WorkerApp(worker, self.lateness, self._sent),
            settings.host,
            settings.worker_port(worker.rank),
            lambda: worker.garbled,
        )

    def _describe_worker(self, rank: int) -> dict[str, object]:
        worker = self.workers[rank]
        model, engine = worker.model, worker.model.engine
        return {
            "rank": rank,
            "role": self.settings.role(rank),
            "url": self.listeners[rank].url,
            "fault": worker.fault.kind if worker.fault else None,
            "load_tokens": engine.load_tokens,
            "running": len(engine.running),
            "waiting": engine.waiting,
            "preemptions": engine.preemptions_total,
            "kv_used_tokens": engine.used_tokens,
            "pending_prompt_tokens": engine.pending_prompt_tokens,
            "prefix_cache": None
            if (cache := engine.prefix_cache) is None
            else {
                "queried_tokens": cache.queried_tokens,
                "hit_tokens": cache.hit_tokens,
                "unheld_blocks": cache.free_blocks,
            },
            "kv_handoff": {
                "kept": len(engine.kept),
                "kept_tokens": engine.kept.tokens,
                **handoff_totals(engine),
            },
            "power_w": model.power_w,
            "energy_j": model.energy_j,
        }
