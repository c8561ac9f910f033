"""Settings that do not fit the model's files or the data: one message that names key, value and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import CheckpointError, SlimeLikeError
from tests.config.bad_input import each_rule, message
from tests.config.model_folder import write_model, write_safetensors

# extra arguments, then words that the message must contain
LAYOUTS = {
    "heads": ("parallel.tp=3", "parallel.tp=3", "8 attention heads", "1, 2, 4, 8"),
    "key/value heads": ("parallel.tp=8", "parallel.tp=8", "4 key/value heads", "1, 2, 4"),
    "layers": ("parallel.pp=5", "parallel.pp=5", "4 layers", "lower parallel.pp"),
    "engine": ("rollout.tp=3", "rollout.tp=3", "8 attention heads"),
    "context": (
        "rollout.max_context_len=4096",
        "rollout.max_context_len=4096",
        "2048 positions",
        "lower rollout.max_context_len",
    ),
    "response": (
        "rollout.max_response_len=2049",
        "rollout.max_response_len=2049",
        "2048 positions",
        "lower rollout.max_response_len",
    ),
    "template": ("data.apply_chat_template=true", "data.apply_chat_template=true", "no chat template", "instruct"),
    "stop token": ("rollout.stop_token_ids=[5,128]", "rollout.stop_token_ids has 128", "is 127"),
    "resume": ("run.resume=/no/such", "run.resume='/no/such'", "auto or never"),
    "data folder": ("data.train=/tmp", "data.train='/tmp'", "is a folder: name one file"),
    "data slice": ("data.train='/no/such.jsonl@[0:10'", "@[0:10'", "write a slice as path@[a:b]"),
    "data": ("data.train=/no/such.jsonl", "data.train='/no/such.jsonl'", "/no/such.jsonl does not exist"),
    "heldout": ("evaluation.datasets.a=/no/such.jsonl", "evaluation.datasets.a='/no/such.jsonl'", "does not exist"),
    "replay": ("run.mode=train_only run.replay_from=/no/such", "run.replay_from='/no/such'", "not a folder"),
    "reference": ("model.ref_checkpoint=/no/such", "model.ref_checkpoint='/no/such'", "not a folder"),
}


@each_rule(LAYOUTS)
def test_settings_that_do_not_fit_the_files_are_named(case: tuple[str, ...], argv: list[str]) -> None:
    extra, *words = case
    text = message(argv, extra, files=True, error=SlimeLikeError)
    assert all(word in text for word in words), text


EMBEDDING = ("model.embed_tokens.weight", (128, 64))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            (("model.embed_tokens.weight", (130, 64)),),
            "model.embed_tokens.weight is [130, 64], but config.json has vocab_size 128",
        ),
        ((EMBEDDING, ("lm_head.weight", (128, 32))), "lm_head.weight is [128, 32]"),
        (
            (EMBEDDING, *((f"model.layers.{i}.w", (1,)) for i in (0, 1, 3))),
            "num_hidden_layers 4, but the weights have no layer 2",
        ),
        ((EMBEDDING, *((f"model.layers.{i}.w", (1,)) for i in range(6))), "the weights have a layer 5"),
    ],
)
@pytest.mark.parametrize("key", ["model.hf_checkpoint", "model.ref_checkpoint"])
def test_weights_that_contradict_config_json_are_named(
    key: str, tensors: tuple[tuple[str, tuple[int, ...]], ...], words: str, argv: list[str], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    write_safetensors(folder / "model.safetensors", dict(tensors))
    text = message(argv, f"{key}={folder}", files=True, error=CheckpointError)
    assert text.startswith(f"{key}={str(folder)!r}: ") and words in text, text


def test_layers_of_other_towers_are_ignored(argv: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    names = [f"model.layers.{i}.w" for i in range(4)] + ["model.visual.layers.9.w", "mtp.layers.7.w"]
    write_safetensors(folder / "model.safetensors", dict([EMBEDDING, *((name, (1,)) for name in names)]))
    assert load_config([*argv, f"model.hf_checkpoint={folder}"]).model.hf_checkpoint == str(folder)
