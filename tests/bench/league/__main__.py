"""``python -m tests.bench.league``: see ``run.py``."""

from tests.bench.league.run import main

if __name__ == "__main__":
    main()
