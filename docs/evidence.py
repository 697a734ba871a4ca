"""Measure again the kept figures whose deciding code has changed since, the shortest command first.

    python -m docs.evidence [--minutes N] [--list] [--only TEXT]

The commands, and how long they took, are those of the figures' headers. What has been measured is
no longer stale, so the next call goes on with the rest. Output goes to out/evidence. A command that
fails is reported, and the others go on. ``--minutes``: no command is begun that took longer than
what is left, and one that still runs then is interrupted. ``--only``: commands that contain a text.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from docs.stale_figures import DATA, changed, kept_headers
from loadgen.report.origin import COMMAND_VARIABLE, ROOT, UNKNOWN, Document

OUT = ROOT / "out/evidence"
# Commands that were interrupted, with the seconds that they at least take.
INTERRUPTED = OUT / "interrupted.json"
_END_S = 30


@dataclass(slots=True)
class Job:
    """A command with the stale figures that it measures.

    Attributes:
        seconds: how long it took, or at least; None: unknown.
        figures: paths below tests/data, with the part's name.
    """

    command: str
    seconds: int | None = None
    figures: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def names(self) -> str:
        """Its figures, by file."""
        files: dict[Path, list[str]] = {}
        for file, part in self.figures:
            files.setdefault(file, []).append(part.removeprefix("studies/"))
        return "; ".join(
            f"{file}: {', '.join(parts)}" if any(parts) else str(file)
            for file, parts in files.items()
        )


def command_of(header: Document) -> str:
    """The command that measures figures again."""
    command = str(header.get("again", header["command"]))
    return command.removeprefix(".venv/bin/")


def jobs(folder: Path = DATA) -> tuple[list[Job], list[Job]]:
    """What is stale: by commands, the shortest first and unknown ones last; and without one."""
    found: dict[str, Job] = {}
    for file, headers in kept_headers(folder):
        for part, header in headers.items():
            if changed(header):
                command = command_of(header)
                job = found.setdefault(command, Job(command))
                job.figures.append((file, part))
                if isinstance(header["seconds"], int):
                    job.seconds = max(job.seconds or 0, header["seconds"])
    for command, seconds in _interrupted().items():
        if command in found:
            found[command].seconds = max(found[command].seconds or 0, seconds)
    unknown = [job for job in found.values() if job.command == UNKNOWN]
    known = [job for job in found.values() if job.command != UNKNOWN]
    return sorted(known, key=lambda job: (job.seconds is None, job.seconds or 0)), unknown


def still_stale(job: Job, folder: Path = DATA) -> list[str]:
    """Figures of the job that are stale."""
    headers = dict(kept_headers(folder))
    return [
        f"{file} {part}".rstrip()
        for file, part in job.figures
        if part not in headers.get(file, {}) or changed(headers[file][part])
    ]


def measure(every: Sequence[Job], minutes: float | None, folder: Path = DATA) -> int:
    """Run the commands; the number of those that failed."""
    end_s = None if minutes is None else time.monotonic() + 60 * minutes
    failed = 0
    for number, job in enumerate(every, 1):
        left_s = None if end_s is None else end_s - time.monotonic()
        if left_s is not None and (left_s <= 0 or (job.seconds or 0) > left_s):
            print(f"the time is up for {len(every) - number + 1} more; the next: {job.command}")
            break
        print(f"[{number}/{len(every)}] {job.command}\n    {job.names}", flush=True)
        problem = _run(job, left_s)
        if problem is None and (stale := still_stale(job, folder)):
            problem = f"it ended well, and these are as stale as before: {', '.join(stale)}"
        failed += problem is not None
        print(f"    {problem or 'measured'}", flush=True)
    return failed


def _run(job: Job, limit_s: float | None) -> str | None:
    """Run one command; its problem, or None."""
    OUT.mkdir(parents=True, exist_ok=True)
    log = OUT / f"{hashlib.sha256(job.command.encode()).hexdigest()[:8]}.log"
    environment = {
        **os.environ,
        COMMAND_VARIABLE: job.command,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    begun_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", job.command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            _note(job.command, round(time.monotonic() - begun_s))
            return f"interrupted: the time is up; {log}"
        except BaseException:
            _end(process)
            raise
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return f"failed with {code}: {last[:200]}; {log}"
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command with all that it has started; what it started may not heed the interrupt."""
    with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _interrupted() -> dict[str, int]:
    found: dict[str, int] = json.loads(INTERRUPTED.read_text()) if INTERRUPTED.exists() else {}
    return found


def _note(command: str, seconds: int) -> None:
    INTERRUPTED.write_text(json.dumps(_interrupted() | {command: seconds}, indent=1) + "\n")


def listed(every: Sequence[Job], unknown: Sequence[Job]) -> str:
    """What would be run, in this order, and what no known command measures."""
    lines = []
    for job in every:
        took = "unknown" if job.seconds is None else f"{job.seconds} s"
        lines += [f"{took:>9}  {job.command}", f"{'':9}  -> {job.names}"]
    lines += [f"no command is known for {job.names}" for job in unknown]
    return "\n".join(lines)


def main() -> None:
    """Measure, or list what would be measured."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--minutes", type=float, help="time for all of it")
    options.add_argument("--list", action="store_true", help="run nothing")
    options.add_argument("--only", default="", metavar="TEXT", help="commands that contain it")
    given = options.parse_args()
    every, unknown = jobs()
    chosen = [job for job in every if given.only in job.command]
    if given.list:
        print(listed(chosen, unknown))
        return
    failed = measure(chosen, given.minutes)
    left = sum(bool(still_stale(job)) for job in chosen)
    print(f"{len(chosen) - left} measured, {failed} failed, {left} left")
    print("python -m docs.generate writes the pages; read the sentences around what has changed.")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
