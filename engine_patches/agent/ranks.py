"""The GPUs of each worker, in the notation of the agent's command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


class RanksError(Exception):
    """Invalid GPUs or workers; the message names them and the remedy."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker by its id in the router ("": by its number), and index or UUID of each GPU."""

    worker: str
    gpus: tuple[str, ...]


def read_ranks(gpus: str | None, workers: Sequence[str]) -> tuple[Rank, ...]:
    """Parse ``--gpus`` (``GPU[,GPU]...``) and ``--ranks-of`` (``WORKER=GPU[+GPU]...`` each).

    Without workers, each GPU is a rank of its own. RanksError: neither is given, one is malformed,
    or they name different GPUs.
    """
    listed = _names("--gpus", gpus, ",") if gpus is not None else ()
    if not workers:
        if not listed:
            raise RanksError("whose power? Give --gpus 0,1 or --ranks-of WORKER=GPU")
        return tuple(Rank("", (gpu,)) for gpu in listed)
    ranks = []
    for text in workers:
        worker, _, named = text.rpartition("=")
        if not worker:
            raise RanksError(f"--ranks-of takes WORKER=GPU[+GPU], as in w0=0+1, got {text!r}")
        ranks.append(Rank(worker, _names(f"--ranks-of {worker}", named, "+")))
    names = [rank.worker for rank in ranks]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RanksError(f"--ranks-of {min(twice)} is given twice: join its GPUs with +")
    if listed and set(listed) != set(chain.from_iterable(rank.gpus for rank in ranks)):
        raise RanksError("--gpus and --ranks-of name different GPUs; --ranks-of alone is enough")
    return tuple(ranks)


def _names(option: str, text: str, separator: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(separator))
    if not all(names):
        raise RanksError(f"{option}: {text!r} should be GPUs with {separator!r} between them")
    if len(set(names)) < len(names):
        raise RanksError(f"{option}: {text!r} names a GPU twice")
    return names
