"""Emulated vLLM workers: engines with modelled steps behind vLLM-shaped HTTP."""
