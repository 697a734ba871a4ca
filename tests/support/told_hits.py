"""``evenstep`` that writes down what it took for cached, for tests and benches.

    python -m tests.support.told_hits FILE serve --worker …

The file gets a line for each request that is compared: the cached prompt tokens that the router had
foretold as it sent it, and those that the engine found.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from router import cli
from router.core.prefix.hit_totals import HitTotals
from tests.support.server import Server, free_port, running


@contextlib.contextmanager
def running_noting(folder: Path, file: Path, *flags: str) -> Iterator[Server]:
    """As ``running_router``."""
    port = free_port()
    noting = [sys.executable, "-m", "tests.support.told_hits", str(file)]
    command = [*noting, "serve", "--port", str(port), *flags]
    with running(command, port, folder / f"router-{port}.log", ready_s=180.0) as server:
        yield server


def noted(file: Path) -> list[tuple[int, int, int]]:
    """Tokens of the prompt, foretold and found, by request so far."""
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    rows = (line.split() for line in whole.splitlines())  # the last may be half written
    return [(int(prompt), int(foretold), int(found)) for prompt, foretold, found in rows]


def totals(rows: list[tuple[int, int, int]]) -> HitTotals:
    """As the router adds them up."""
    sums = HitTotals()
    for row in rows:
        sums.compare(*row)
    return sums


def main() -> None:
    file = Path(sys.argv.pop(1))
    compare = HitTotals.compare

    def noting(
        record: HitTotals, prompt_tokens: int, predicted_tokens: int, found_tokens: int
    ) -> None:
        compare(record, prompt_tokens, predicted_tokens, found_tokens)
        with file.open("a") as lines:
            lines.write(f"{prompt_tokens} {predicted_tokens} {found_tokens}\n")

    HitTotals.compare = noting  # type: ignore[assignment, method-assign]
    cli.main()


if __name__ == "__main__":
    main()
