"""Engines with continuous batching, as a pure model: the emulator and the simulators share them."""
