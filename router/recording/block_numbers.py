"""Numbers in place of the ids of prompts' blocks: they tell which prompts begin alike, no more."""

from collections import OrderedDict
from collections.abc import Sequence

MOST_BLOCKS = 1 << 18


class BlockNumbers:
    """Numbers ids in the order in which they are first seen.

    At most ``most`` ids are known, in some 50 MB. What was not seen for the longest time goes
    first, of one prompt its end, and has a new number when it comes again.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._next = 0
        self._numbers: OrderedDict[int, int] = OrderedDict()

    def runs(self, ids: Sequence[int]) -> list[int]:
        """A prompt's numbers: the first of each run of consecutive ones, and how many follow on it.

        New blocks get consecutive numbers, so a conversation has about one run for each turn.
        """
        runs: list[int] = []
        numbers: list[int] = []
        for id_ in ids:
            number = self._numbers.pop(id_, None)
            if number is None:
                number, self._next = self._next, self._next + 1
            if numbers and number == numbers[-1] + 1:
                runs[-1] += 1
            else:
                runs += (number, 1)
            numbers.append(number)
        # A block is of no use without those before it: they stay longer.
        self._numbers.update(zip(reversed(ids), reversed(numbers), strict=True))
        while len(self._numbers) > self._most:
            self._numbers.popitem(last=False)
        return runs
