"""Request traces: lengths and arrival times; ``trace_files`` reads the published formats."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from loadgen.traces.trace_files import TraceRequest, read_requests
from router.core.errors import InputError

__all__ = ["BUNDLED", "Trace", "TraceRequest", "load_trace"]

_DATA = Path(__file__).parent / "data"
# Names that are accepted in place of a file; origin and licence: data/ATTRIBUTION.md.
BUNDLED: Mapping[str, Path] = {
    "burstgpt": _DATA / "burstgpt_lengths_8000.csv.gz",
    "azure-conv": _DATA / "AzureLLMInferenceTrace_conv.csv.gz",
    "mooncake-synthetic": _DATA / "mooncake_synthetic_trace.jsonl.gz",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """The usable requests of one file, in its order."""

    name: str
    format: str  # name of the matching row of ``FORMATS``, or "recording"
    requests: tuple[TraceRequest, ...]

    @property
    def max_output_tokens(self) -> int:
        """A cap that cuts nothing."""
        return max(request.output_tokens for request in self.requests)

    def sample(self, count: int, seed: int) -> tuple[TraceRequest, ...]:
        """Draw requests without their arrival times.

        Without replacement while there are enough rows, else with replacement. Requests that share
        prefixes are the first ones in the trace's order, again and again.
        """
        rng = random.Random(seed)
        rows = self.requests
        if any(row.blocks for row in rows):
            firsts = islice(cycle(rows), count)
            return tuple(replace(row, arrival_s=None) for row in firsts)
        drawn = rng.sample(rows, count) if count <= len(rows) else rng.choices(rows, k=count)
        return tuple(TraceRequest(row.prompt_tokens, row.output_tokens) for row in drawn)

    def earliest(self, count: int | None = None) -> tuple[TraceRequest, ...]:
        """The first requests in order of arrival, timed from the first one.

        Raises:
            InputError: the trace has no arrival times, or fewer than ``count`` requests.
        """
        timed = [(row.arrival_s, row) for row in self.requests if row.arrival_s is not None]
        if not timed:
            raise InputError(
                f"{self.name}: has no arrival times; use other --arrivals or another trace"
            )
        if count is not None and count > len(timed):
            raise InputError(
                f"{self.name}: has {len(timed)} usable requests, not {count}; lower --requests, "
                "or use --arrivals closed:N or poisson:RATE, which draw rows again"
            )
        timed.sort(key=lambda pair: pair[0])
        start_s = timed[0][0]
        return tuple(replace(row, arrival_s=at_s - start_s) for at_s, row in timed[:count])


def load_trace(source: Path | str = "burstgpt") -> Trace:
    """Read one of ``BUNDLED``, or a file: in one of ``FORMATS`` or a recording, plain or gzipped.

    Raises:
        InputError: the file cannot be read or a row is broken; names the line and the remedy.
    """
    if source in BUNDLED:
        return _bundled(str(source))
    path = Path(source)
    return Trace(path.name, *read_requests(path))


@cache
def _bundled(name: str) -> Trace:
    return Trace(BUNDLED[name].name, *read_requests(BUNDLED[name]))
