"""Flower's in-memory server, and clients that answer at once. Runs in a Python with flwr and without promptfed.

    python benchmarks/flower/server.py server PORT CLIENTS ROUNDS ROWS COLUMNS
    python benchmarks/flower/server.py own-clients PORT CLIENTS ROWS COLUMNS
    python benchmarks/flower/server.py lean-clients PORT CLIENTS ROWS COLUMNS

The server is the one behind flwr's legacy ``start_server``: bidirectional gRPC streams, FedAvg, everything in memory.
It prints one line of JSON: the seconds of each round, from the first instruction sent to the last answer received,
without the aggregation; wall and CPU seconds from the first instruction of the first round to the last answer of the
last round; its memory when idle and at its peak. All clients run in one process with a connection each, as in
``benchmarks.coordinator_load``. They are flwr's own, in a thread each, or lean ones, which exchange the same messages
on one event loop and answer as fast as promptfed's players.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import json
import logging
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.proto import transport_pb2, transport_pb2_grpc
from flwr.server.client_manager import SimpleClientManager
from flwr.server.server import Server
from flwr.server.strategy import FedAvg
from flwr.server.superlink.fleet.grpc_bidi.grpc_server import start_grpc_server

MESSAGE_BYTES = 512 << 20


def memory_mb(key: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process. This file runs in a Python without promptfed."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


class Timed(FedAvg):  # type: ignore[misc]
    """Federated averaging that measures the time from a round's first instruction to its last answer."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.seconds: list[float] = []

    def configure_fit(self, *arguments: Any, **named: Any) -> Any:
        instructions = super().configure_fit(*arguments, **named)
        self._begun = time.perf_counter(), time.process_time()
        if not self.seconds:
            self.first = self._begun
        return instructions

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.seconds.append(time.perf_counter() - self._begun[0])
        self.whole = time.perf_counter() - self.first[0], time.process_time() - self.first[1]
        if failures:
            raise SystemExit(f"{len(failures)} clients failed: {failures[0]}")
        return super().aggregate_fit(server_round, results, failures)


def serve(port: int, clients: int, rounds: int, shape: tuple[int, int]) -> None:
    """Run the server for all rounds and print its figures."""
    strategy = Timed(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=ndarrays_to_parameters([np.zeros(shape, np.float32)]),
    )
    manager = SimpleClientManager()
    server = Server(client_manager=manager, strategy=strategy)
    grpc_server = start_grpc_server(manager, f"127.0.0.1:{port}", max_concurrent_workers=max(1000, clients + 10))
    idle = memory_mb("VmRSS")
    print("listening", file=sys.stderr, flush=True)
    server.fit(num_rounds=rounds, timeout=None)
    server.disconnect_all_clients(timeout=10)
    grpc_server.stop(1)
    figures = {"seconds": strategy.seconds, "whole_seconds": strategy.whole[0], "cpu_seconds": strategy.whole[1]}
    figures |= {"idle_mb": idle, "peak_mb": memory_mb("VmHWM"), "flwr": importlib.metadata.version("flwr")}
    print(json.dumps(figures), flush=True)


async def answer(port: int, content: bytes) -> None:
    """Play a lean client, which sends ``content`` (an .npy file) as its update for every instruction."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", MESSAGE_BYTES)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        stream = transport_pb2_grpc.FlowerServiceStub(channel).Join()
        update = transport_pb2.ClientMessage.FitRes(
            status=transport_pb2.Status(code=transport_pb2.Code.OK),
            parameters=transport_pb2.Parameters(tensors=[content], tensor_type="numpy.ndarray"),
            num_examples=10,
        )
        while (message := await stream.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("msg")
            if kind == "fit_ins":
                await stream.write(transport_pb2.ClientMessage(fit_res=update))
            elif kind == "reconnect_ins":
                farewell = transport_pb2.ClientMessage.DisconnectRes(reason=transport_pb2.Reason.ACK)
                await stream.write(transport_pb2.ClientMessage(disconnect_res=farewell))
                await stream.done_writing()
                return
            else:
                raise SystemExit(f"the server asks for {kind}")


async def play_lean(port: int, clients: int, content: np.ndarray) -> None:
    """Play all lean clients on this event loop."""
    file = io.BytesIO()
    np.save(file, content)
    await asyncio.gather(*(answer(port, file.getvalue()) for _ in range(clients)))


def play_own(port: int, clients: int, content: np.ndarray) -> None:
    """Play all clients with flwr's own code; they do not train."""
    # Imported here, so that they do not count in the server's memory.
    from flwr.compat.client.app import start_client
    from flwr.compat.client.numpy_client import NumPyClient

    class Answering(NumPyClient):  # type: ignore[misc]
        def fit(self, parameters: Any, config: Any) -> Any:
            return [content], 10, {}

    logging.getLogger("flwr").setLevel(logging.ERROR)
    options = {"server_address": f"127.0.0.1:{port}", "client": Answering().to_client(), "insecure": True}
    threads = [threading.Thread(target=start_client, kwargs=options) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Run the server or all clients."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    side, *numbers = sys.argv[1:]
    counts = [int(number) for number in numbers]
    if side == "server":
        serve(counts[0], counts[1], counts[2], (counts[3], counts[4]))
        return
    content = np.random.default_rng(0).standard_normal((counts[2], counts[3]), dtype=np.float32)
    if side == "own-clients":
        play_own(counts[0], counts[1], content)
    else:
        asyncio.run(play_lean(counts[0], counts[1], content))


if __name__ == "__main__":
    main()
