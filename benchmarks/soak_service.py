"""``rag-demo serve`` under load: queries alone and beside bulk work, a soak, SIGTERM at its end.

The service listens on loopback, with the packaged model and an index of short texts. Environment:
``SOAK_S`` (300) seconds of the soak, ``ROUND_S`` (10) of each comparison, ``CLIENTS`` (64).
Beside the queries, one client embeds 256 texts at a time, and one adds 20 documents at a time.
During the soak, one client changes documents and opens the index again each second.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.results_file import write

COUNTS = (8, 32, 64)
SOAK_S = float(os.environ.get("SOAK_S", 300))
ROUND_S = float(os.environ.get("ROUND_S", 10))
CLIENTS = int(os.environ.get("CLIENTS", 64))
BIN = Path(sys.executable).parent
TEXTS = [
    f"text {n} is about {a} and {b}"
    for n, (a, b) in enumerate(
        (a, b) for a in ("memory", "leases", "models", "signals", "caches") for b in range(40)
    )
]
QUERIES = [f"what about {a} and {b}?" for a in ("memory", "leases", "signals") for b in range(40)]


class Server:
    """The service as a program under clean-exit."""

    def __init__(self, index: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        serve = [BIN / "rag-demo", "serve", "--index", index, "--port", str(self.port), *options]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the server)
        command = [BIN / "clean-exit", "--max-shutdown", "60", "--", *serve, "--log-level"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen([*command, "WARNING"], stderr=self.log, env=environment)

    async def ready(self) -> None:
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"the service ended: {self.output()}")
            try:
                if (await request(self.port, "GET", "/readyz"))[0] == 200:
                    return
            except OSError:
                await asyncio.sleep(0.2)

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()[-2000:]

    def stop(self) -> tuple[int, float]:
        started = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120), time.perf_counter() - started


class Client:
    """A client that keeps its connection, and connects again after the server has closed it."""

    def __init__(self, port: int) -> None:
        self.port, self.writer = port, None

    async def send(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        content = b"" if body is None else json.dumps(body).encode()
        self.writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        head = await self.reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        found = await self.reader.readexactly(int(fields[b"content-length"]))
        if fields.get(b"connection") == b"close":
            self.close()
        return int(head.split()[1]), found

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


async def request(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    client = Client(port)
    try:
        return await client.send(method, path, body)
    finally:
        client.close()


def search_body(query: str) -> dict[str, Any]:
    return {"query": query, "mode": "dense", "top_k": 3}


def ids(content: bytes) -> list[str]:
    return [each["id"] for each in json.loads(content)["results"]]


async def load(
    port: int, count: int, until: Any, expected: dict[str, list[str]]
) -> tuple[list[float], Counter[str]]:
    """Run clients until ``until()`` is true; return the times in seconds and the outcomes."""
    times: list[float] = []
    outcomes: Counter[str] = Counter()

    async def one(seed: int) -> None:
        chance, client = random.Random(seed), Client(port)
        while not until():
            query = chance.choice(QUERIES)
            started = time.perf_counter()
            is_new = client.writer is None
            try:
                status, content = await client.send("POST", "/search", search_body(query))
            except ConnectionRefusedError:
                outcomes["refused"] += 1
                return
            except (OSError, asyncio.IncompleteReadError) as error:
                # On a kept connection, which the server may have closed, the request was not
                # accepted. On a new connection it is lost.
                outcomes["lost" if is_new else f"closed: {type(error).__name__}"] += 1
                client.close()
                continue
            times.append(time.perf_counter() - started)
            right = status == 200 and (not expected or ids(content) == expected[query])
            outcomes["right" if right else f"wrong, {status}"] += 1
        client.close()

    await asyncio.gather(*(one(seed) for seed in range(count)))
    return times, outcomes


def summary(times: list[float], seconds: float) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "requests_per_s": round(len(ordered) / seconds, 1),
        "p50_ms": round(ordered[len(ordered) // 2] * 1e3, 1),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 1),
    }


async def bulk(port: int, until: Any, done: Counter[str]) -> None:
    """Embed many texts and add documents, one request after the other, until ``until()``."""
    words = " ".join(TEXTS)

    async def repeat(name: str, method: str, path: str, body: Any, count: int) -> None:
        client = Client(port)
        while not until():
            status, content = await client.send(method, path, body)
            if status == 200:
                done[name] += count
            elif status not in (429, 503):
                raise SystemExit(f"{path}: {status} {content!r}")
            else:
                await asyncio.sleep(0.5)
        client.close()

    texts = [words[start : start + 400] for start in range(0, 256 * 20, 20)]
    new = [{"id": f"new {n}", "text": text} for n, text in enumerate(texts[:20])]
    await asyncio.gather(
        repeat("texts embedded", "POST", "/embed", {"inputs": texts}, len(texts)),
        repeat("documents added", "PUT", "/documents", {"documents": new}, len(new)),
    )


async def compare(index: Path) -> dict[str, Any]:
    """Measure queries of several clients, alone and beside bulk work, on one server."""
    found: dict[str, Any] = {}
    server = Server(index, "--writable")
    await server.ready()
    await load(server.port, 8, later(2), {})
    for count in COUNTS:
        rounds = []
        for beside in ("alone", "beside bulk"):
            ends, started = later(ROUND_S), time.perf_counter()
            done: Counter[str] = Counter()
            beside_it = [] if beside == "alone" else [bulk(server.port, ends, done)]
            work = asyncio.gather(*beside_it)
            times, _ = await load(server.port, count, ends, {})
            seconds = time.perf_counter() - started
            await work
            whole = time.perf_counter() - started
            of_round = summary(times, seconds) | {
                f"{name} per s": round(number / whole, 1) for name, number in done.items()
            }
            rounds.append(of_round)
            found[f"{count} clients, {beside}"] = of_round
        found[f"{count} clients, {beside}"]["p99 ratio"] = round(
            rounds[1]["p99_ms"] / rounds[0]["p99_ms"], 2
        )
    server.stop()
    return found


def later(seconds: float) -> Any:
    """Return a function that is true after so many seconds."""
    ends = time.perf_counter() + seconds
    return lambda: time.perf_counter() > ends


async def expected_answers(port: int) -> dict[str, list[str]]:
    """Return the ids for each query, from requests of one client."""
    return {
        query: ids((await request(port, "POST", "/search", search_body(query)))[1])
        for query in QUERIES
    }


async def resident(port: int) -> int:
    text = (await request(port, "GET", "/metrics"))[1].decode()
    (line,) = [each for each in text.splitlines() if each.startswith("process_resident_memory_b")]
    return int(float(line.split()[1]))


async def swap(port: int, until: Any, done: Counter[str]) -> None:
    """Replace documents with themselves and open the index again, each second, ``until()``."""
    same = {"documents": [{"id": str(n), "text": text} for n, text in enumerate(TEXTS[:20])]}
    while not until():
        for method, path, body in (("PUT", "/documents", same), ("POST", "/admin/reload", None)):
            status, _ = await request(port, method, path, body)
            done[f"{method} {path}, {status}"] += 1
        await asyncio.sleep(1)


async def soak(index: Path) -> dict[str, Any]:
    server = Server(index, "--writable")
    await server.ready()
    expected = await expected_answers(server.port)
    fresh = await resident(server.port)
    # oneDNN keeps compiled code for each batch size. Create all of it before the measurement, which
    # looks for growth with the number of requests.
    for size in range(1, 65):
        await request(server.port, "POST", "/search", {"queries": QUERIES[:size], "mode": "dense"})
        await request(server.port, "POST", "/search", {"queries": QUERIES[-size:], "mode": "dense"})
    stopping = asyncio.Event()
    points: list[tuple[int, int]] = []
    done: list[int] = [0]

    async def watch() -> None:
        while not stopping.is_set():
            text = (await request(server.port, "GET", "/metrics"))[1].decode()
            lines = [line for line in text.splitlines() if line.startswith("rag_demo_requests_t")]
            done[0] = int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))
            points.append((done[0], await resident(server.port)))
            await asyncio.sleep(max(1.0, SOAK_S / 100))

    watcher = asyncio.create_task(watch())
    clients = asyncio.create_task(load(server.port, CLIENTS, stopping.is_set, expected))
    changes: Counter[str] = Counter()
    await swap(server.port, later(SOAK_S), changes)
    watcher.cancel()
    stopped = asyncio.create_task(asyncio.to_thread(server.stop))
    await asyncio.sleep(0.5)
    stopping.set()
    times, outcomes = await clients
    answered = time.perf_counter()
    code, _ = await stopped
    return {
        "clients": CLIENTS,
        "seconds": SOAK_S,
        **summary(times, SOAK_S),
        "outcomes": dict(outcomes),
        "changes": dict(changes),
        "resident_mb": {
            "at first": round(fresh / 1e6, 1),
            "after batches of all sizes": round(points[0][1] / 1e6, 1),
            "at the end": round(points[-1][1] / 1e6, 1),
        },
        "slope_mb_per_10000_requests": round(slope(points[len(points) // 3 :]) * 1e4 / 1e6, 3),
        "exit_code": code,
        "exit_s_after_the_last_answer": round(time.perf_counter() - answered, 2),
        "clean": "clean-exit: clean" in server.output(),
    }


def slope(points: list[tuple[int, int]]) -> float:
    """Return the slope of a least-squares fit of bytes over requests."""
    if len(points) < 2:
        return 0.0
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    over = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return over / (sum((x - middle_x) ** 2 for x, _ in points) or 1)


def make_index(folder: Path) -> Path:
    source, index = folder / "texts.jsonl", folder / "index"
    lines = [json.dumps({"id": str(n), "text": text}) for n, text in enumerate(TEXTS)]
    source.write_text("\n".join(lines))
    make = [BIN / "rag-demo", "index", source, "--out", index, "--no-cache"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    return index


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = make_index(Path(folder))
        result = {"speed": asyncio.run(compare(index)), "soak": asyncio.run(soak(index))}
        write("service", result)
    found = result["soak"]
    lost = set(found["outcomes"]) & {"lost"} | {k for k in found["outcomes"] if "wrong" in k}
    sys.exit(0 if found["clean"] and not lost else 1)


if __name__ == "__main__":
    main()
