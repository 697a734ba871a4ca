"""``evenstep replay``: a workload sent over real HTTP, and what came of it."""
