"""Barrier-synchronized decode in virtual time, with the live router's core inside; no I/O."""
