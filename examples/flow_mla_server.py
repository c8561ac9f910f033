"""FlowMLA in SGLang's own server, without a trainer: two ranks of data-parallel attention, each with half of every o_proj.

    python examples/flow_mla_server.py /models/DeepSeek-V2-Lite                          # two GPUs
    python examples/flow_mla_server.py /models/Qwen3-0.6B --device cpu                    # a CPU

The server uses slime_like only through its SGLang plugins, which ``pip install`` registers. The script sends one request of
token ids, prints the response and stops the server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_like.printable import visible
from slime_like.rollout.engine.server import derived_ports
from slime_like.util.ports import PortLease

START_S, REQUEST_S = 600.0, 120.0
CPU_ENVIRONMENT = {
    "SLIME_LIKE_SGLANG": "cpu",  # SGLang on a CPU without sgl-kernel
    "SGLANG_PLATFORM": "slime_like_cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def server_arguments(model: str, device: str, port: int) -> list[str]:
    """Return the arguments of ``sglang.launch_server``. They have no ``--host``: the server listens on loopback."""
    arguments = ["--model-path", model, "--port", str(port), "--skip-tokenizer-init"]
    arguments += ["--tp-size", "2", "--attention-data-parallel-size", "2"]
    arguments += ["--enable-flow-mla", "--flow-mla-weights", "o_proj", "--flow-mla-transport", "p2p"]
    if device == "cpu":
        return [*arguments, "--device", "cpu", "--dtype", "float32", "--disable-overlap-schedule"]
    return [*arguments, "--cuda-graph-backend-prefill", "disabled"]


def ask(port: int, token_ids: Sequence[int], is_alive: Callable[[], bool]) -> list[int]:
    """Wait until the server is ready, send it ``token_ids`` and return its greedy response.

    Raises ``SystemExit`` if the server ends while it starts or is not ready within ``START_S``, and the errors of ``request``.
    """
    end = time.monotonic() + START_S
    while True:
        try:
            request("GET", port, "/health", None, 10)
            break
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            if not is_alive() or time.monotonic() > end:
                raise SystemExit("the server has ended, or is not ready after 10 minutes: read its log") from None
            time.sleep(0.5)
    body = {"input_ids": list(token_ids), "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    return request("POST", port, "/generate", body, REQUEST_S)["output_ids"]


def request(method: str, port: int, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
    """Return the JSON of the server's response; None if it is empty.

    Raises ``OSError`` if the server cannot be reached, reports an error or sends nothing for ``timeout`` seconds.
    """
    data = None if body is None else json.dumps(body).encode()
    message = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, method=method)
    message.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy
    with opener.open(message, timeout=timeout) as response:
        text = response.read()
    return json.loads(text) if text else None


def main() -> None:
    """Start the server, send a request and stop the server."""
    parser = argparse.ArgumentParser(description="Run SGLang with FlowMLA on two ranks.")
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    lease = PortLease("127.0.0.1", derived_ports(2))
    arguments = server_arguments(options.model, options.device, lease.port)
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    environment = os.environ | (CPU_ENVIRONMENT if options.device == "cpu" else {})
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        response = ask(lease.port, [5, 6, 7], lambda: server.poll() is None)
        sys.stdout.write(visible(f"response: {response}\n"))
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # the server, its detokenizer and the scheduler of each rank
        server.wait(REQUEST_S)


if __name__ == "__main__":
    main()
