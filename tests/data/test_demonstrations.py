"""Supervised fine-tuning data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.demonstrations import Demonstrations
from slime_like.errors import ConfigError, DataError
from tests.data.character_tokenizer import characters
from tests.data.sources import TEN, plain_tokenizer, source, write


def test_label_and_end_token_are_trained(tmp_path: Path) -> None:
    prompts = source(write(tmp_path / "a.jsonl", [{"prompt": "2+2=", "label": "44"}]))
    group = Demonstrations(prompts, plain_tokenizer(), max_context_len=64).next(1, first_group_id=5)[0]
    batch = assemble([group], AssembleSpec(None, "token_mean", 1, 1, 100, 16), rollout_id=0)
    row = batch.steps[0].micro_batches[0][0]
    assert plain_tokenizer().decode(row.token_ids[row.loss_weight > 0]) == "44[EOS]"
    assert plain_tokenizer().decode(row.token_ids) == "2+2=44[EOS]"
    np.testing.assert_allclose(row.loss_weight.sum(), 1)
    assert (row.versions == -1).all() and (row.rollout_logprobs == 0).all()
    assert (group.group_id, batch.num_tokens, row.advantages) == (5, 3, None)


def test_the_cursor_resumes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEN)
    demonstrations = Demonstrations(source(path), plain_tokenizer(), 64)
    demonstrations.next(7, 0)
    resumed_data = Demonstrations(source(path), plain_tokenizer(), 64)
    resumed_data.load_state(demonstrations.state())
    assert [g.prompt.prompt_id for g in resumed_data.next(5, 7)] == [
        g.prompt.prompt_id for g in demonstrations.next(5, 7)
    ]


def test_too_long_a_row_names_file_line_and_key(tmp_path: Path) -> None:
    prompts = source(write(tmp_path / "a.jsonl", [TEN[0], {"prompt": "x" * 60, "label": "1234"}]))
    with pytest.raises(
        DataError, match=r"a.jsonl, line 2: .+ are 65 tokens long, more than rollout.max_context_len=64"
    ):
        Demonstrations(prompts, plain_tokenizer(), max_context_len=64)


def test_a_row_without_label_names_file_and_line(tmp_path: Path) -> None:
    prompts = source(write(tmp_path / "a.jsonl", [TEN[0], {"prompt": "x"}]), needs_label=lambda rm_type: False)
    with pytest.raises(DataError, match=r"a.jsonl, line 2: label missing"):
        Demonstrations(prompts, plain_tokenizer(), max_context_len=64)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    prompts = source(write(tmp_path / "a.jsonl", TEN))
    with pytest.raises(ConfigError, match="'/models/tiny' has no eos_token"):
        Demonstrations(prompts, characters(eos=False), max_context_len=64)
