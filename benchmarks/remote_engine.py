"""Decoding by engines on this CPU with half of the experts in a worker, relative to an engine with all experts.

    python benchmarks/remote_engine.py [--intermediate 64 --hidden 128] [--batches 16 64] [--rounds 5]

The model is a random Qwen3-MoE with 4 layers of 32 experts, 4 per token, float32. All engines stay up and are measured in
turn; a worker needs a second core. Times are measured as in ``decode.py``: the time of decoding is that of a call minus that of
a call for one token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.decode import SAMPLES_PER_PROMPT, EngineArm, engine_spec, measure  # noqa: E402
from benchmarks.options import at_least  # noqa: E402
from benchmarks.run import machine  # noqa: E402
from slime_like.config.schema.remote_experts import RemoteOptions  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.quickstart.model import ExpertSpec, ModelSpec, write_model  # noqa: E402

EXPERTS, TOP_K, LAYERS = 32, 4, 4
LOCAL = "all local"
ARMS = {
    LOCAL: "",
    **{
        transport: RemoteOptions(count=EXPERTS // 2, transport=transport, deadline_s=120.0).to_json()
        for transport in ("shared", "socket")
    },
}


def make_model(folder: Path, hidden: int, intermediate: int) -> ModelSpec:
    """Write a random model to ``folder`` and return its shape."""
    experts = ExpertSpec(EXPERTS, TOP_K, intermediate, shared_expert_intermediate_size=0)
    spec = ModelSpec(
        "qwen3_moe",
        hidden_size=hidden,
        num_hidden_layers=LAYERS,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        experts=experts,
    )
    write_model(folder, spec)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))  # no sample ends early
    return spec


def main() -> None:
    """Print a table with four rows for each batch size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=at_least(128, multiple=128), default=128)
    parser.add_argument("--intermediate", type=at_least(1), default=64)
    parser.add_argument("--batches", nargs="+", type=at_least(8, multiple=SAMPLES_PER_PROMPT), default=[16])
    parser.add_argument("--steps", type=at_least(2), default=64, help="new tokens per sample")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    options = parser.parse_args()
    print(visible(f"{machine(os.getloadavg()[0])}\nexperts of {options.intermediate} x {options.hidden}"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        shape = make_model(model, options.hidden, options.intermediate)
        runners: dict[str, Callable[..., None]] = {}
        for name, remote in ARMS.items():
            log = Path(folder) / f"{name.replace(' ', '_')}.log"
            spec = engine_spec(model, "float32", max(options.batches), log, remote_experts=remote)
            runners[name] = arm = EngineArm(name, spec, threads=1)
            stack.callback(arm.server.stop)
        for arm in runners.values():
            assert isinstance(arm, EngineArm)
            arm.server.wait_ready()
        measure(runners, options, shape.vocab_size, LOCAL)


if __name__ == "__main__":
    main()
