"""Your own data and reward: sums of three numbers, scored digit by digit.

    python train.py +recipe=quickstart run.name=own_data data.train=runs/own_data.jsonl evaluation.datasets={} \\
        run.prepare=examples/own_data.py:prepare reward.name=examples/own_data.py:score

It uses the model of ``+recipe=quickstart``: run that recipe once first, or set
``model.hf_checkpoint=/models/Qwen3-0.6B`` to use another model. If your data file already exists, set ``run.prepare=null``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from slime_like.config.schema.root import TrainConfig
from slime_like.reward.kinds import needs_label
from slime_like.types import Prompt, Sample

NUM_ROWS = 1000


def prepare(config: TrainConfig) -> None:
    """Write ``data.train``, one JSON object per line, before anything starts."""
    rng, path = random.Random(0), Path(config.data.train)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for _ in range(NUM_ROWS):
            a, b, c = rng.randrange(100, 1000), rng.randrange(10), rng.randrange(10)
            file.write(json.dumps({"prompt": f"{a}+{b}+{c}=", "label": str(a + b + c)}) + "\n")


@needs_label
def score(prompt: Prompt, sample: Sample) -> float:
    """Return the number of positions at which label and answer agree, divided by the length of the longer one."""
    label, answer = prompt.label or "", sample.text.strip()
    return sum(a == b for a, b in zip(label, answer, strict=False)) / max(len(label), len(answer), 1)
