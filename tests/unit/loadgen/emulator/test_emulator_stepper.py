"""Steps of emulated workers in wall time."""

import asyncio

from loadgen.emulator.emulated_worker import EmulatedWorker
from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.emulator.state_stream import StateStream
from loadgen.emulator.stepper import Lateness, Stepper
from loadgen.engine.request import EngineRequest
from loadgen.engine.stepping import Step, StepGroup
from router.core.step_time import StepBudget, StepTime


class Told(StateStream):
    """Routers tell it another budget after each step."""

    def __init__(self, rank: int) -> None:
        super().__init__(None, group="g", worker=f"{rank}", rank=rank)
        self.group: StepGroup | None = None
        self._more = rank

    @property
    def told_prompt_budget(self) -> StepBudget:
        assert self.group is not None
        return StepBudget(100 + self.group.steps + self._more)


class Stepped:
    """A group of workers, and the budget of each step, by worker."""

    def __init__(self, ranks: int) -> None:
        settings = EmulatorSettings(workers=ranks, step_time=StepTime(1e-3, 0.0))
        streams = [Told(rank) for rank in range(ranks)]
        self.workers = [EmulatedWorker(rank, settings, streams[rank], {}) for rank in range(ranks)]
        group = settings.step_group([worker.model for worker in self.workers])
        for stream in streams:
            stream.group = group
        self.budgets: list[list[int]] = []
        self.ended = asyncio.Event()
        self._stepper = Stepper(group, self.workers, 1.0, Lateness(), self._record)

    async def run(self, *waves: int) -> None:
        """Waves of so many steps; between two of them all workers rest."""
        stepping = asyncio.create_task(self._stepper.run())
        for number, steps in enumerate(waves):
            self.ended.clear()
            self.workers[0].model.engine.add(EngineRequest(f"{number}", 5, steps))
            vars(self.workers[0])["show_tokens"] = lambda _: None  # no client waits for them
            self.workers[0].on_change()
            await self.ended.wait()
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)

    def _record(self, _: Step, *__: float) -> None:
        self.budgets.append([worker.model.prompt_budget for worker in self.workers])
        if not self._stepper.group.unfinished:
            self.ended.set()


async def test_ranks_agree_on_a_budget_after_the_steps_that_the_plug_in_names() -> None:
    """After the first of each eight since all rested, and as all begin to rest."""
    none = 0
    stepped = Stepped(ranks=2)
    await stepped.run(3, 11)
    assert [one for one, other in stepped.budgets if one == other] == [
        *(none, 101, 101),
        *(103, *[104] * 8, 112, 112),
    ]


async def test_a_worker_alone_keeps_to_what_it_was_told_last() -> None:
    stepped = Stepped(ranks=1)
    await stepped.run(3, 2)
    assert stepped.budgets == [[100], [101], [102], [103], [104]]
