"""A picture of a placement. Needs the extra ``plots``."""

from pathlib import Path

from loadgen.planner.plan_report import Answer
from loadgen.report.charts import COLOURS, finish, panels, save

# Most servers in the picture, and its height with so many.
_MOST = 60
_INCHES = 0.28


def draw_placement(path: Path, answer: Answer) -> None:
    """Which blocks lie on which server, one colour a chain, the fastest on top (PNG)."""
    drawn = answer.memory[:_MOST]
    figure, (axes,) = panels(1, height=max(2.4, 1.4 + _INCHES * len(drawn)))
    colour = {e.name: COLOURS[1 + i % (len(COLOURS) - 1)] for i, e in enumerate(answer.engines)}
    for row, memory in enumerate(drawn):
        blocks, look = memory.blocks, colour[memory.engine.name]
        axes.barh(row, len(blocks), left=blocks.start, color=look, edgecolor="white")
    labels = [
        f"{memory.machine.name}, {memory.engine.chain.slots} slots, "
        f"{memory.weights_bytes / 1e9:.1f} + {memory.kv_bytes / 1e9:.1f} GB"
        for memory in drawn
    ]
    axes.set_yticks(range(len(drawn)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, answer.plan.question.model.blocks)
    finish(axes, "block of the model", "", answer.model_name)
    left = len(answer.memory) - len(drawn)
    cut = f"; {left} further servers not drawn" if left else ""
    save(figure, path, f"one colour a chain; its slots, GB of weights + KV on the server{cut}")
