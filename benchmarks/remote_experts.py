"""Benchmark of remote experts on this CPU: MoE layers with half of the experts in a worker process, and with all in one process.

    python benchmarks/remote_experts.py --rounds 5 --write

Only the experts run, without attention and router, so all times are those of experts. Arms take turns within a round. All arms
compute the same sums, which is checked within a tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.options import at_least  # noqa: E402
from benchmarks.run import PAGES, machine, write  # noqa: E402
from slime_like.config.schema.remote_experts import RemoteOptions  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like_plugins.remote_experts.client import Traffic  # noqa: E402
from slime_like_plugins.remote_experts.compute import Ids, Weights, expert_sums, nothing  # noqa: E402
from slime_like_plugins.remote_experts.experts import RemoteExperts  # noqa: E402
from slime_like_plugins.remote_experts.process import MODULE  # noqa: E402
from slime_like_plugins.remote_experts.routing import ExpertRows, split  # noqa: E402
from slime_like_plugins.remote_experts.shapes import ExpertShapes  # noqa: E402

EXPERTS, TOP_K = 32, 4
PROMPT, CHUNK = 4_248, 2_048  # tokens
DECODE_BATCH, DECODE_STEPS = 16, 30
SLOW = 10.0
ROWS = ExpertRows(EXPERTS, range(EXPERTS // 2, EXPERTS))
LOCAL, LOCAL_PLUGIN = "all local", "all local, by the plugin"
ARMS: Mapping[str, tuple[str, str]] = {
    "stream, float32": ("stream", "float32"),
    "stream, float16": ("stream", "float16"),
    "batched, float32": ("batched", "float32"),
    "batched, float16": ("batched", "float16"),
    "auto, float32": ("auto", "float32"),
}


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Number of MoE layers, and the dimensions of their experts."""

    layers: int
    hidden: int
    intermediate: int

    def __str__(self) -> str:
        return f"{self.layers} layers, intermediate size {self.intermediate}, hidden size {self.hidden}"


SMALL, LARGE = LayerSize(4, 128, 64), LayerSize(2, 1024, 512)
TOLERANCE = {"float32": 1e-5, "float16": 2e-2}


@dataclass(frozen=True, slots=True)
class BenchLayer:
    """Weights of one layer, and the routes of a prompt's tokens."""

    w13: Tensor
    w2: Tensor
    ids: Ids
    weights: Weights


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Measurements of one arm."""

    prefill_s: tuple[float, ...]  # seconds of one prompt's prefill, for each round
    decode_s: tuple[float, ...]  # seconds of all decode steps
    calls: int  # to the worker, for one prompt
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class TableSetting:
    """Settings of one of the benchmark's tables."""

    size: LayerSize
    transport: str
    slowdown: float = 1.0
    arms: tuple[str, ...] = tuple(ARMS)
    decodes: bool = True


SETTINGS: Mapping[str, TableSetting] = {
    "Shared memory": TableSetting(SMALL, "shared"),
    "Socket": TableSetting(SMALL, "socket"),
    f"Shared memory, computation {SLOW:.0f} times slower": TableSetting(SMALL, "shared", SLOW, decodes=False),
    "Shared memory, larger experts": TableSetting(
        LARGE, "shared", arms=("stream, float32", "batched, float32", "auto, float32")
    ),
}


def make_layers(size: LayerSize = SMALL, seed: int = 0) -> list[BenchLayer]:
    """Return layers with random weights, and with random routes of each token to ``TOP_K`` experts."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[BenchLayer] = []
    hidden, intermediate = size.hidden, size.intermediate
    for _ in range(size.layers):
        w13 = torch.randn((EXPERTS, 2 * intermediate, hidden), generator=generator) / hidden**0.5
        w2 = torch.randn((EXPERTS, hidden, intermediate), generator=generator) / intermediate**0.5
        values, ids = torch.randn((PROMPT, EXPERTS), generator=generator).topk(TOP_K)
        layers.append(BenchLayer(w13, w2, ids.to(torch.int32).numpy(), values.softmax(1).numpy()))
    return layers


class Local:
    """All experts in one process, computed by the plugin."""

    def __init__(self, layers: Sequence[BenchLayer]) -> None:
        self._layers = layers

    def sums(self, index: int, x: Tensor, ids: Ids, weights: Weights) -> Tensor:
        """Return, for each token of ``x``, the weighted sum of its experts' outputs in layer ``index``."""
        layer = self._layers[index]
        return expert_sums(x, ids, weights, layer.w13, layer.w2)


class LocalSGLang(Local):
    """All experts in one process, computed by SGLang, as in an engine on a CPU without remote experts."""

    def __init__(self, layers: Sequence[BenchLayer]) -> None:
        from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        self._forward: Any = moe_forward_native
        self._topk: Any = StandardTopKOutput
        self._experts = [
            SimpleNamespace(num_experts=EXPERTS, w13_weight=layer.w13, w2_weight=layer.w2) for layer in layers
        ]
        fields = {"gemm1_alpha": None, "gemm1_clamp_limit": None}
        self._config = SimpleNamespace(apply_router_weight_on_input=False, activation="silu", **fields)

    def sums(self, index: int, x: Tensor, ids: Ids, weights: Weights) -> Tensor:
        """Return, for each token of ``x``, the weighted sum of its experts' outputs in layer ``index``."""
        topk = self._topk(torch.from_numpy(weights), torch.from_numpy(ids), None)
        return self._forward(self._experts[index], x, topk, self._config)


class Remote:
    """Half of the experts in this process, half in a worker.

    The constructor connects to the worker and sends it the weights. It raises the errors of ``RemoteExperts.open``, and
    ``SystemExit`` if the worker fails later. Close ``experts`` at the end.
    """

    def __init__(self, layers: Sequence[BenchLayer], options: RemoteOptions) -> None:
        self.experts = RemoteExperts(options, 0)
        num = EXPERTS // 2
        self._local = [(layer.w13[:num].contiguous(), layer.w2[:num].contiguous()) for layer in layers]
        indices = tuple(range(len(layers)))
        _, hidden, intermediate = layers[0].w2.shape
        self.experts.open(ExpertShapes(indices, (num,) * len(layers), hidden, intermediate, "float32", 1024, TOP_K))
        for index, layer in enumerate(layers):
            for expert in range(num):
                self.experts.write(index, "w13", expert, 0, layer.w13[num + expert])
                self.experts.write(index, "w2", expert, 0, layer.w2[num + expert])
        if problem := self.experts.commit():
            raise SystemExit(problem)

    def sums(self, index: int, x: Tensor, ids: Ids, weights: Weights) -> Tensor:
        """Return, for each token of ``x``, the weighted sum of its experts' outputs in layer ``index``."""
        local, buckets = split(ids, weights, ROWS)
        w13, w2 = self._local[index]

        def compute_local(feed: Callable[[], None]) -> Tensor:
            return expert_sums(x, local, weights, w13, w2, feed)

        return self.experts.add_sums(index, x, buckets, compute_local) if buckets else compute_local(nothing)


def prefill(run: Local | Remote, layers: Sequence[BenchLayer], x: Tensor) -> Tensor:
    """Return the hidden states of the prompt after all layers, computed chunk by chunk."""
    outputs: list[Tensor] = []
    for start in range(0, PROMPT, CHUNK):
        part = slice(start, start + CHUNK)
        hidden = x[part]
        for index, layer in enumerate(layers):
            hidden = hidden + run.sums(index, hidden, layer.ids[part], layer.weights[part])
        outputs.append(hidden)
    return torch.cat(outputs)


def decode(run: Local | Remote, layers: Sequence[BenchLayer], x: Tensor) -> None:
    """Run decode steps of a batch, in which each row has the routes of one token of the prompt."""
    for step in range(DECODE_STEPS):
        part = slice(step * DECODE_BATCH, (step + 1) * DECODE_BATCH)
        hidden = x[part]
        for index, layer in enumerate(layers):
            hidden = hidden + run.sums(index, hidden, layer.ids[part], layer.weights[part])


@contextlib.contextmanager
def worker(folder: Path, slowdown: float, name: str) -> Generator[tuple[str, str]]:
    """Yield the address and the key file of a worker process."""
    key_file = folder / f"key_{name}"
    key_file.touch(0o600)
    key_file.write_text(secrets.token_hex(32))
    command = [sys.executable, "-m", MODULE, "--listen", "127.0.0.1:0", "--key-file", str(key_file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[:2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--slowdown", str(slowdown)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], str(key_file)
    finally:
        process.kill()
        process.wait(10)


def measure(setting: TableSetting, rounds: int) -> dict[str, ArmResult]:
    """Return results by arm. Two arms have all experts in one process, one with SGLang's function, one with the plugin's.

    The others are the arms of ``setting``.

    Raises the errors of ``Remote``, and ``SystemExit`` if the hidden states of an arm differ from SGLang's by more than the
    tolerance.
    """
    torch.set_num_threads(1)
    layers = make_layers(setting.size)
    x = torch.randn((PROMPT, setting.size.hidden), generator=torch.Generator().manual_seed(1))
    arms = {name: ARMS[name] for name in setting.arms}
    runs: dict[str, Local | Remote] = {LOCAL: LocalSGLang(layers), LOCAL_PLUGIN: Local(layers)}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for number, (name, (mode, dtype)) in enumerate(arms.items()):
            address, key_file = stack.enter_context(worker(Path(folder), setting.slowdown, str(number)))
            options = RemoteOptions(
                count=EXPERTS // 2,
                mode=mode,
                payload_dtype=dtype,
                transport=setting.transport,
                workers=(address,),
                key_file=key_file,
                deadline_s=120.0,
            )
            runs[name] = run = Remote(layers, options)
            stack.callback(run.experts.close)
        expected = prefill(runs[LOCAL], layers, x)
        dtypes = {LOCAL_PLUGIN: "float32"} | {name: dtype for name, (_, dtype) in arms.items()}
        for name, dtype in dtypes.items():  # also warms up, and lets auto measure both modes
            hidden = prefill(runs[name], layers, x)
            difference = float((hidden - expected).abs().max() / expected.abs().max())
            if difference > TOLERANCE[dtype]:
                raise SystemExit(f"{name} differs from {LOCAL} by {difference:.1e}")
        return results(runs, layers, x, rounds, setting.decodes)


def results(
    runs: Mapping[str, Local | Remote], layers: Sequence[BenchLayer], x: Tensor, rounds: int, decodes: bool
) -> dict[str, ArmResult]:
    """Return the results of ``runs``, each measured once per round; decode steps are run only if ``decodes``."""
    prefills: dict[str, list[float]] = {name: [] for name in runs}
    steps: dict[str, list[float]] = {name: [] for name in runs}
    traffic_counts: dict[str, tuple[int, int]] = dict.fromkeys(runs, (0, 0))
    for _ in range(rounds):
        for name, run in runs.items():
            before = traffic(run)
            start = time.perf_counter()
            prefill(run, layers, x)
            prefills[name].append(time.perf_counter() - start)
            after = traffic(run)
            traffic_counts[name] = after.calls - before.calls, after.payload_bytes - before.payload_bytes
            if decodes:
                start = time.perf_counter()
                decode(run, layers, x)
                steps[name].append(time.perf_counter() - start)
    return {name: ArmResult(tuple(prefills[name]), tuple(steps[name]), *traffic_counts[name]) for name in runs}


def traffic(run: Local | Remote) -> Traffic:
    """Return the counters of a run; they are zeros if it has no worker."""
    return run.experts.traffic if isinstance(run, Remote) else Traffic()


def table(arms: Mapping[str, ArmResult]) -> list[str]:
    """Return the lines of a table. Times are medians; percentages compare calls and payload with the arm "stream, float32"."""
    base = arms["stream, float32"]
    lines = [
        "| experts | calls | payload, MiB | prefill, s | decode, tokens/s |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, arm in arms.items():
        calls, payload = (
            ("-", "-")
            if not arm.calls
            else (
                f"{arm.calls:,} ({arm.calls / base.calls - 1:+.1%})",
                f"{arm.payload_bytes / 2**20:.2f} ({arm.payload_bytes / base.payload_bytes - 1:+.1%})",
            )
        )
        tokens_per_s = f"{DECODE_STEPS * DECODE_BATCH / statistics.median(arm.decode_s):,.0f}" if arm.decode_s else "-"
        lines.append(f"| {name} | {calls} | {payload} | {statistics.median(arm.prefill_s):.3f} | {tokens_per_s} |")
    return lines


def page(tables: Mapping[str, Mapping[str, ArmResult]], about: str, command: str, rounds: int) -> str:
    """Return the page with all tables."""
    lines = [
        "# Remote experts, measured",
        "",
        about,
        "",
        f"Command: `{command}`. MoE layers without attention, in float32: {EXPERTS} experts, {TOP_K} per token. A worker "
        f"with one thread has {EXPERTS // 2} experts of each layer; the engine, also with one thread, has the others. "
        f"Sizes: {SMALL}; in the table of larger experts, {LARGE}. "
        f"Prefill: one prompt of {PROMPT:,} tokens in chunks of {CHUNK:,}. Decode: {DECODE_STEPS} steps of {DECODE_BATCH} requests. "
        f"Medians of {rounds} rounds, in which the arms take turns. Calls and payload (requests and replies) are those of one prompt; in "
        'parentheses, the change relative to "stream, float32".',
        "",
        f"- `{LOCAL}`: SGLang's function computes all experts, as in an engine on a CPU without remote experts.",
        f"- `{LOCAL_PLUGIN}`: the plugin's function computes all experts. With the arms below, the same function computes both halves of the "
        "experts, in the engine and in the worker.",
        "- `stream`: requests of up to 32 tokens. `batched`: up to the worker's capacity. `auto`: whichever of the two is measured to be "
        "faster. The name of each arm ends with the dtype of its payload.",
    ]
    for title, arms in tables.items():
        lines += ["", f"## {title}", "", *table(arms)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--write", action="store_true", help="write docs/measurements/remote_experts.md")
    options = parser.parse_args()
    about = machine(os.getloadavg()[0])
    tables: dict[str, dict[str, ArmResult]] = {}
    for title, setting in SETTINGS.items():
        tables[title] = measure(setting, options.rounds)
        print(visible("\n".join((title, *table(tables[title])))), flush=True)
    command = f"python benchmarks/remote_experts.py --rounds {options.rounds} --write"
    text = page(tables, about, command, options.rounds)
    print(visible(text))
    if options.write:
        write(PAGES / "remote_experts.md", text)


if __name__ == "__main__":
    main()
