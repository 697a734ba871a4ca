"""Modules that the measurements need; it imports none of them."""

from importlib.util import find_spec

NEEDED = ("httpx", "msgspec", "numpy", "zmq")
OF_A_ROUTER = (
    *("fastapi", "httptools", "prometheus_client", "pydantic", "rich", "typer"),
    *("uvicorn", "uvloop"),
)


def missing(modules: tuple[str, ...]) -> list[str]:
    """Those that this interpreter does not have."""
    return [name for name in modules if find_spec(name) is None]
