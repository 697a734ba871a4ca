"""Markdown tables of means with their 95 % intervals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadgen.figures.samples import Sample
from loadgen.report.charts import Line
from loadgen.report.intervals import Estimate


@dataclass(frozen=True, slots=True)
class Column:
    """A metric as a column, or as a curve."""

    title: str  # with the unit
    metric: str  # key of a sample's values
    unit: float = 1.0  # divisor of the value
    digits: int = 2  # after the decimal point

    def cell(self, sample: Sample | None) -> str:
        """Mean and interval; a dash if there is none."""
        found = None if sample is None else sample.of(self.metric)
        return "–" if found is None else shown(found, self.unit, self.digits)

    def beside(self, sample: Sample, target: float) -> list[str]:
        """A target in the metric's own unit, and how far the mean is from it."""
        return [f"{target / self.unit:g}", f"{sample.mean(self.metric) / target - 1:+.1%}"]

    def line(self, name: str, xs: Sequence[float], samples: Iterable[Sample], style: int) -> Line:
        """A curve with one sample for each x."""
        return Line(name, xs, [sample.of(self.metric) for sample in samples], self.unit, style)


IMBALANCE = Column("imbalance, 10⁴ tokens", "avg_imbalance_tokens", 1e4)
THROUGHPUT = Column("throughput, 10⁴ tok/s", "throughput_tok_s", 1e4)
TPOT = Column("TPOT, ms", "tpot_mean_s", 1e-3)
ENERGY = Column("energy, kJ", "energy_j", 1e3, 1)
MEAN_LOAD = Column("mean load, 10³ tokens", "mean_load_tokens", 1e3, 1)
PROMPT = Column("mean admitted prompt", "mean_admitted_prompt_tokens", 1.0, 0)
LONGEST_WAIT = Column("longest wait, steps", "max_pool_wait_steps", 1.0, 0)
TTFT = Column("TTFT mean, s", "ttft_mean_s", 1.0, 3)
TTFT_P99 = Column("TTFT p99, s", "ttft_p99_s", 1.0, 2)
BUBBLE = Column("slot bubble, steps", "slot_bubble_steps")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title line; the first columns are text, the others numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    text_columns: int = 1

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        figures = len(self.header) - self.text_columns
        align = ["---"] * self.text_columns + ["---:"] * figures
        lines = ["| " + " | ".join(row) + " |" for row in [self.header, align, *self.rows]]
        return "\n".join([f"**{self.title}**", "", *lines] if self.title else lines)


def metric_table(
    title: str, first: str, samples: Sequence[tuple[str, Sample | None]], columns: Sequence[Column]
) -> Table:
    """A table with one row per sample."""
    rows = [[name, *(column.cell(sample) for column in columns)] for name, sample in samples]
    return Table([first, *(column.title for column in columns)], rows, title)


def shown(found: Estimate, unit: float, digits: int) -> str:
    """``1.43 ± 0.05``."""
    text = f"{found.mean / unit:,.{digits}f}"
    if found.half_width is None or found.half_width == 0:
        return text
    return f"{text} ± {found.half_width / unit:,.{digits}f}"


def chosen_parameters(sample: Sample) -> str:
    """Range of H, gamma, mu and lead in force at the end of the runs."""
    if not sample.each("horizon"):
        return "–"
    parts = []
    for name, key, form in _CHOSEN:
        values = sample.each(key)
        ends = sorted({format(min(values), form), format(max(values), form)}, key=float)
        parts.append(f"{name} {' to '.join(ends)}")
    return ", ".join(parts)


_CHOSEN = (
    ("H", "horizon", "g"),
    ("γ", "discount", ".2f"),
    ("μ", "tie_weight", ".2g"),
    ("lead", "lead_tokens", ".0f"),
)
