"""What does not fit the files of a model or its data ends in one message that names key, value and fix."""

from __future__ import annotations

import pytest

from slime_like.errors import SlimeLikeError
from tests.config.bad_input import message

# extra arguments, what the message must hold
LAYOUTS = {
    "heads": ("parallel.tp=3", "parallel.tp=3", "8 attention heads", "1, 2, 4, 8"),
    "key/value heads": ("parallel.tp=8", "parallel.tp=8", "4 key/value heads", "1, 2, 4"),
    "layers": ("parallel.pp=5", "parallel.pp=5", "4 layers", "lower parallel.pp"),
    "engine": ("rollout.tp=3", "rollout.tp=3", "8 attention heads"),
    "context": ("rollout.max_context_len=4096", "rollout.max_context_len=4096", "2048 positions", "lower it"),
    "response": ("rollout.max_response_len=2048", "rollout.max_response_len=2048", "2048 positions", "lower it"),
    "template": ("data.apply_chat_template=true", "data.apply_chat_template=true", "no chat template", "instruct"),
    "resume": ("run.resume=/no/such", "run.resume='/no/such'", "auto or never"),
    "data folder": ("data.train=/tmp", "data.train='/tmp'", "is a folder: name one file"),
    "data slice": ("data.train='/no/such.jsonl@[0:10'", "@[0:10'", "a slice is written path@[a:b]"),
    "data": ("data.train=/no/such.jsonl", "data.train='/no/such.jsonl'", "/no/such.jsonl does not exist"),
    "heldout": ("evaluation.datasets.a=/no/such.jsonl", "evaluation.datasets.a='/no/such.jsonl'", "does not exist"),
    "replay": ("run.mode=train_only run.replay_from=/no/such", "run.replay_from='/no/such'", "not a folder"),
    "reference": ("model.ref_checkpoint=/no/such", "model.ref_checkpoint='/no/such'", "not a folder"),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=list(LAYOUTS))
def test_what_does_not_fit_the_files(case: tuple[str, ...], argv: list[str]) -> None:
    extra, *words = case
    text = message(argv, extra, files=True, error=SlimeLikeError)
    assert all(word in text for word in words), text
