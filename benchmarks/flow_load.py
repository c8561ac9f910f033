"""Memory of an engine's ranks while they load a model, with and without FlowMLA, on this CPU.

    python benchmarks/flow_load.py

One after another, engines of two ranks with data-parallel attention load the same random Qwen3, whose weights are
mostly attention weights. The anonymous and shared memory of each rank is sampled from the start of its process until it
serves. Files that are mapped, such as the checkpoint, are not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.run import machine  # noqa: E402
from slime_like.config.schema.flow_mla import FlowOptions  # noqa: E402
from slime_like.config.schema.resolved import EngineSpec  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.quickstart.model import ModelSpec, write_model  # noqa: E402
from slime_like.rollout.engine import processes  # noqa: E402
from slime_like.rollout.engine.server import EngineServer  # noqa: E402

RANKS, MIB, SAMPLE_S = 2, 1 << 20, 0.003
MODEL = ModelSpec(
    hidden_size=1024,
    intermediate_size=256,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=512,
)
LAYER_BYTES = 4 * MODEL.hidden_size * MODEL.head_dim * 2 * (MODEL.num_attention_heads + MODEL.num_key_value_heads)
"""Bytes of one layer's projections in float32."""
ARMS: Mapping[str, str] = {
    "off": "",
    "collective": FlowOptions(("o_proj", "qkv_proj")).to_json(),
    "p2p": FlowOptions(("o_proj", "qkv_proj"), transport="p2p").to_json(),
}
"""Engine -> settings of FlowMLA."""
KEY = "benchmark"


@dataclass(slots=True)
class RankMemory:
    """Sampled memory of the ranks of an engine, in bytes."""

    server: EngineServer
    peaks: dict[int, int] = field(default_factory=dict[int, int])  # by process id
    stop: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> None:
        """Record the largest memory of each rank in ``peaks`` until ``stop`` is set."""
        while not self.stop.is_set():
            for pid in processes.pids_of_part(self.server.pid, "scheduler"):
                self.peaks[pid] = max(self.peaks.get(pid, 0), resident(pid))
            time.sleep(SAMPLE_S)


def resident(pid: int) -> int:
    """Return the anonymous and shared memory of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def run_arm(name: str, model: Path) -> tuple[int, int]:
    """Start an engine and stop it. Return two sizes in bytes, each the largest of the ranks.

    The first is the peak of memory during the start, the second is the memory once the engine is ready. No request is sent.
    """
    spec = EngineSpec(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        tp=RANKS,
        context_length=64,
        seed=0,
        log_path=str(model.parent / f"engine_{name}.log"),
        start_deadline_s=400,
        dp_attention=RANKS,
        flow_mla=ARMS[name],
        sglang={"max_total_tokens": 256},
    )
    server = EngineServer(spec, admin_key=KEY)
    try:
        server.start()
        memory = RankMemory(server)
        sampler = threading.Thread(target=memory.sample, daemon=True)
        sampler.start()
        server.wait_ready()
        memory.stop.set()
        sampler.join(60)
        return max(memory.peaks.values()), max(resident(pid) for pid in memory.peaks)
    finally:
        server.stop()


def table(results: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the Markdown table."""
    full = MODEL.num_hidden_layers * LAYER_BYTES
    lines = [
        "| engine | attention weights of a rank by the formula, MiB | memory while serving, MiB | saved while serving, MiB | saved at the peak while starting, MiB |",
        "|---|---|---|---|---|",
    ]
    off_peak, off_serving = results["off"]
    for name, (peak, serving) in results.items():
        weights = full // RANKS + 2 * LAYER_BYTES if ARMS[name] else full
        lines.append(
            f"| {name} | {weights / MIB:.0f} | {serving / MIB:.0f} | {(off_serving - serving) / MIB:.0f} | {(off_peak - peak) / MIB:.0f} |"
        )
    return lines


def main(argv: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory of weights returns to the system
    machine_line = machine(os.getloadavg()[0])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, MODEL)
        results = {name: run_arm(name, model) for name in ARMS}
    lines = [machine_line, "", f"A layer's projections have {LAYER_BYTES / MIB:.0f} MiB.", "", *table(results)]
    print(visible("\n".join(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
