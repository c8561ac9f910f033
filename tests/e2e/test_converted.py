"""A launch script of slime for fine-tuning on conversations is converted, and train.py trains with the recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_like.quickstart.model import DENSE, write_model
from slime_like_compat.conversion import SAME
from slime_like_compat.slime.job import convert_script
from tests.data.character_tokenizer import characters
from tests.e2e.runs import REPOSITORY, metrics, train, unwritable_home

pytestmark = pytest.mark.e2e
SCRIPT = REPOSITORY / "tests" / "convert" / "slime" / "run-sft.sh"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALLER = (  # the script has 8 GPUs, 128 conversations per step and bfloat16
    *("placement.device=cpu", "placement.actor_num_gpus_per_node=1", "model.dtype=float32"),
    *("rollout.batch_size=16", "loop.global_batch_size=8", "optim.lr=1e-3"),
)


def test_a_converted_fine_tuning_script_trains(tmp_path: Path) -> None:
    assert convert_script(SCRIPT, tmp_path / "recipe" / "sft.yaml").code == SAME
    write_model(tmp_path / "model", replace(DENSE, vocab_size=128, max_position_embeddings=2048))
    characters(template=CHATML).save_pretrained(tmp_path / "model")
    turns = [
        [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
        for a in range(8)
        for b in range(8)
    ]
    pq.write_table(pa.table({"messages": turns}), tmp_path / "conversations.parquet")
    result = train(
        *("--config-dir", str(tmp_path), "+recipe=sft", *SMALLER, f"run.dir={tmp_path / 'run'}"),
        *(f"model.hf_checkpoint={tmp_path / 'model'}", f"data.train={tmp_path / 'conversations.parquet'}"),
        log=tmp_path / "log",
        environment=unwritable_home(),
    )
    assert result.code == 0, result.output
    losses = [row["train/loss"] for row in metrics(tmp_path / "run") if "train/loss" in row]
    assert len(losses) == 12, "three epochs of 64 conversations, 16 at a time"
    assert losses[-1] < losses[0] / 2, losses
