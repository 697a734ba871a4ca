"""Simulation of unequal servers in chains; "Serving Chain-structured Jobs …", section 4."""
