"""Inputs that the driver reads before it starts processes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_like.cluster.plan.machine import probe_machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.start.inputs import load_inputs, stop_tokens
from slime_like.config.load.loader import load_config
from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import DataError
from tests.config.model_folder import write_model
from tests.data.character_tokenizer import characters

ROWS = 13


def stops(folder: Path, *, tokenizer: int | None, generation: object, config: object = None) -> tuple[int, ...]:
    write_model(folder, eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    cfg = TrainConfig(algo=GrpoConfig())
    cfg = replace(
        cfg, model=replace(cfg.model, hf_checkpoint=str(folder)), rollout=replace(cfg.rollout, stop_token_ids=[9])
    )
    return stop_tokens(cfg, SimpleNamespace(eos_token_id=tokenizer), 100)


def test_stop_tokens_come_from_tokenizer_checkpoint_and_user(tmp_path: Path) -> None:
    assert stops(tmp_path, tokenizer=99, generation=[1, 2], config=3) == (1, 2, 3, 9, 99)
    assert stops(tmp_path, tokenizer=None, generation=None) == (9,)


@pytest.mark.parametrize(
    ("tokenizer", "generation", "config", "name"),
    [
        (100, None, None, "tokenizer"),
        (None, [1, 100], None, "generation_config.json"),
        (None, None, 100, "config.json"),
    ],
)
def test_a_stop_token_outside_the_vocabulary_is_refused(
    tmp_path: Path, tokenizer: int | None, generation: object, config: object, name: str
) -> None:
    with pytest.raises(
        DataError, match=f"model.hf_checkpoint=.*: its {name} ends responses with token 100, .* ends at 99"
    ):
        stops(tmp_path, tokenizer=tokenizer, generation=generation, config=config)


@pytest.mark.parametrize(
    ("sizes", "num_prompts"),
    [(["rollout.batch_size=9"], 9), (["rollout.batch_size=6", "rollout.over_sampling_batch_size=10"], 10)],
)
def test_a_rollout_has_no_duplicate_prompts(tmp_path: Path, sizes: list[str], num_prompts: int) -> None:
    characters().save_pretrained(write_model(tmp_path / "model"))
    rows = (json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(ROWS))
    (tmp_path / "train.jsonl").write_text("".join(rows))
    cfg = load_config([f"model.hf_checkpoint={tmp_path / 'model'}", f"data.train={tmp_path / 'train.jsonl'}", *sizes])
    source = load_inputs(cfg, make_plan(cfg, probe_machine())).source
    assert source is not None
    for rollout_id in range(20):  # most of these rollouts span two epochs
        prompts = [prompt.prompt_id for prompt in source.next(num_prompts)]
        assert len(set(prompts)) == num_prompts, f"rollout {rollout_id}: {prompts}"
