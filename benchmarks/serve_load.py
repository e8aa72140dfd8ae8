"""Requests a second of `memfit serve`, beside a plain FastAPI script around transformers' pipeline.

    python benchmarks/serve_load.py RUN --seconds 30 --out benchmarks/results/serve_load.json

RUN is a finished run with ONNX files. Every server has a process of its own on loopback, and all
are loaded before the first is asked. Each client sends its next text when the last is answered.
At every number of clients the servers take their turns, so that a machine that gets slower is
unfair to none; the load average before each turn stands beside its figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp

CLIENTS = (1, 8, 32, 128)
BACKENDS = ("torch", "onnx", "onnx-int8")
PHRASES = (
    "服务人员都很亲切", "早餐不好吃", "房间很干净，位置也方便", "等了一个小时才送到，饭都凉了",
    "书的内容很精彩，值得一读", "电池用了两天就坏了", "下次还会再来", "性价比不高",
)  # fmt: skip

# What people write today: FastAPI runs it in its pool of threads, a text at a time.
PLAIN = """
import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import pipeline

app = FastAPI()
classify = pipeline("text-classification", sys.argv[1], device="cpu")


class Body(BaseModel):
    inputs: str


@app.post("/predict")
def predict(body: Body):
    return classify(body.inputs, truncation=True)


@app.get("/health")
def health():
    return {}


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error", access_log=False)
"""


def texts() -> list[bytes]:
    """Bodies of one to three phrases, 6 to 45 characters."""
    count = len(PHRASES)
    return [
        json.dumps({"inputs": "，".join(PHRASES[(n * (k + 1) + k) % count]
                                       for k in range(1 + n % 3))}).encode()
        for n in range(64)
    ]  # fmt: skip


@contextlib.contextmanager
def served(words: list[str], port: int) -> Iterator[None]:
    """Starts a server and waits until it answers; ends it with SIGTERM."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise SystemExit(f"{words} ended with {process.returncode}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def client(number: int, port: int, ends: float, taken: list[float]) -> int:
    """Asks until the time is over, on one connection; returns how many answers were not 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    bodies, failed, turn = texts(), 0, number
    while (began := time.perf_counter()) < ends:
        body = bodies[turn % len(bodies)]
        turn += 1
        writer.write(
            b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            failed += 1
        elif (now := time.perf_counter()) <= ends:
            taken.append(now - began)
    writer.close()
    return failed


async def turn(port: int, clients: int, seconds: float) -> dict[str, Any]:
    """One server at one number of clients."""
    load = os.getloadavg()[0]
    taken: list[float] = []
    ends = time.perf_counter() + seconds
    failed = await asyncio.gather(*(client(n, port, ends, taken) for n in range(clients)))
    ranked = sorted(taken) or [seconds]
    return {
        "clients": clients,
        "requests_a_second": round(len(taken) / seconds, 2),
        "median_milliseconds": round(1000 * statistics.median(ranked), 2),
        "p99_milliseconds": round(1000 * ranked[min(int(0.99 * len(ranked)), len(ranked) - 1)], 2),
        "failed": sum(failed),
        "load_average_before": round(load, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--out", type=Path, default=Path("serve_load.json"))
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        script = Path(folder) / "plain.py"
        script.write_text(PLAIN)
        ports = {"fastapi + pipeline": free_port()}
        port = ports["fastapi + pipeline"]
        stack.enter_context(served([str(script), str(options.run), str(port)], port))
        for backend in options.backends:
            port = ports[f"memfit serve, {backend}"] = free_port()
            words = ["-m", "memfit", "serve", str(options.run), "--backend", backend]
            stack.enter_context(served([*words, "--port", str(port)], port))
        for port in ports.values():  # the first answers allocate
            asyncio.run(turn(port, 2, 1.0))
        for clients in CLIENTS:
            for name, port in ports.items():
                result = asyncio.run(turn(port, clients, options.seconds))
                found.setdefault(name, []).append(result)
                print(name, result, flush=True)
    made = {
        "machine": stamp(), "run": options.run.name, "seconds": options.seconds,
        "note": "the clients share the machine's cores with the servers",
        "servers": found,
    }  # fmt: skip
    options.out.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
