"""Emulated vLLM workers: vLLM's HTTP API in front of engines with modelled steps."""
