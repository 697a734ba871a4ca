"""``evenstep replay``: send a workload over real HTTP and measure the answers."""
