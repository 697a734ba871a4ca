"""The configurations of this folder with other addresses, as JSON, which Envoy reads too."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent


def plain(port: int, http: int, grpc: int, engines: Sequence[int], *, ext_proc: bool) -> Any:
    """The configuration: ports of 127.0.0.1 for clients, of the picker, of the engines."""
    config = _placed("envoy.yaml", port, picker=[http], picker_grpc=[grpc], engines=engines)
    if ext_proc:
        asking = yaml.safe_load((FOLDER / "ext_proc.yaml").read_text(encoding="utf-8"))
        manager_of(config)["http_filters"][0] = asking
        del manager_of(config)["local_reply_config"]
    return config


def before_replicas(port: int, routers: Sequence[int]) -> Any:
    """That of an Envoy before replicas of ``evenstep serve``, by their ports of 127.0.0.1."""
    return _placed("replicas.yaml", port, routers=routers)


def _placed(file: str, port: int, **clusters: Sequence[int]) -> Any:
    config = yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))
    static = config["static_resources"]
    static["listeners"][0]["address"] = _address(port)
    for cluster in static["clusters"]:
        places = [{"endpoint": {"address": _address(each)}} for each in clusters[cluster["name"]]]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": places}]
    return config


def manager_of(config: Any) -> Any:
    """What handles the clients' connections."""
    listener = config["static_resources"]["listeners"][0]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def command(program: Path | str, config: Any, file: Path) -> list[str]:
    """Starts Envoy with a configuration, which is written to the file."""
    file.write_text(json.dumps(config), encoding="utf-8")
    flags = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")
    return [str(program), "-c", str(file), *flags]


def _address(port: int) -> Any:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
