"""What an emulated fleet costs: CPU seconds per second of wall time, events and snapshots counted.

    python tests/bench/bench_emulator.py [--workers 8] [--running 72] [--interval 20] [--seconds 10]

Each worker runs --running endless streams at 100 steps/s; they are read here, and so are all
snapshots. The fleet is a process of its own, whose CPU time the kernel tells.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import zmq

FIRST_PORT = 18_300
EMULATE = [sys.executable, "-m", "router.cli", "emulate"]


class Reader(asyncio.Protocol):
    """Counts the events of one endless stream."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self.body)}"
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(head.encode() + b"\r\n\r\n" + self.body)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drain(socket: zmq.Socket[bytes]) -> int:
    taken = 0
    try:
        while True:
            socket.recv(zmq.NOBLOCK)
            taken += 1
    except zmq.Again:
        return taken


async def measure(
    ready: dict[str, Any], process: subprocess.Popen[bytes], running: int, seconds: int
) -> None:
    loop = asyncio.get_running_loop()
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RCVHWM, 100_000)
    body = json.dumps(
        {"prompt": list(range(1000)), "max_tokens": 90_000, "ignore_eos": True, "stream": True}
    ).encode()
    readers: list[Reader] = []
    for worker in ready["workers"]:
        socket.connect(worker["snapshots"])
        port = int(worker["url"].rpartition(":")[2])
        for _ in range(running):
            _, reader = await loop.create_connection(lambda: Reader(body), "127.0.0.1", port)
            readers.append(reader)
    await asyncio.sleep(2)
    drain(socket)
    before = time.monotonic(), cpu_s(process), sum(reader.events for reader in readers)
    await asyncio.sleep(seconds)
    wall_s = time.monotonic() - before[0]
    used_s = cpu_s(process) - before[1]
    events = sum(reader.events for reader in readers) - before[2]
    snapshots = drain(socket)
    context.destroy(linger=0)
    async with httpx.AsyncClient() as client:
        fleet = (await client.get(f"{ready['control']}/fleet")).json()
    print(
        f"{len(readers)} streams, {events / wall_s:.0f} events/s, "
        f"{snapshots / wall_s:.0f} snapshots/s"
    )
    print(f"CPU: {100 * used_s / wall_s:.1f} % of a core")
    print(f"lateness, fractions of a step: {fleet['lateness']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--running", type=int, default=72)
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ready.json"
        flags = {
            "--workers": options.workers,
            "--port": FIRST_PORT,
            "--slots": max(1, options.running),
            "--kv-tokens": 100_000_000,
            "--max-model-len": 100_000,
            "--step-time": "0.01,0",
            "--stream-interval": options.interval,
            "--json": file,
        }
        process = subprocess.Popen([*EMULATE, *(str(x) for flag in flags.items() for x in flag)])
        try:
            while not file.exists() and process.poll() is None:
                time.sleep(0.05)
            asyncio.run(
                measure(json.loads(file.read_text()), process, options.running, options.seconds)
            )
        finally:
            process.terminate()
            process.wait(timeout=10)


if __name__ == "__main__":
    main()
