"""The plan lists the user's functions, and the keys of the algorithm that they leave without effect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.user_code import APPLIED_BY, code_rows, unread_keys
from slime_like.cluster.plan.view import render_plan, show_plan
from slime_like.config.load.loader import load_config
from slime_like.config.schema import names
from slime_like.config.schema.known import known_keys
from tests.config.machines import LAPTOP

OWN_CODE = """
from slime_like.algo.bind import bind_off_policy
from slime_like.algo.loss import policy_gradient

class Loss:
    needs_entropy = False
    def __init__(self, config):
        self.config = config
    def __call__(self, view):
        return None

class WithKL(Loss):
    def __call__(self, view):
        return self.config.kl_loss_coef

class WithCorrection(Loss):
    def __init__(self, config):
        self.correct = bind_off_policy(config)

class Wrapper(Loss):
    def __init__(self, config):
        self.loss = policy_gradient(config)

class Advantage:
    def __init__(self, config):
        self.gamma = config.gamma
    def __call__(self, views, reduce):
        return []
    def returns(self, views):
        return []

def correction(config, old_logprobs, rollout_logprobs, sequences):
    return None

def score(prompt, sample):
    return 0.0

def short(group):
    return "long"

def prepare(config):
    pass
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of the current directory with the user's functions."""
    file = tmp_path / "own_code.py"
    file.write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return file


@pytest.fixture
def unread(argv: list[str], own_file: Path) -> Callable[[str], tuple[str, ...]]:
    """Return a function that returns the unread keys of extra arguments."""
    return lambda extra: unread_keys(load_config([*argv, *extra.split()], files=False))


def line_of(file: Path, text: str) -> str:
    """Return ``file:line`` of the line that begins with ``text``."""
    lines = file.read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if line.startswith(text))}"


def test_the_plan_lists_key_path_and_file_of_each_user_function(argv: list[str], own_file: Path) -> None:
    paths = [
        "reward.name=own_code.py:score",
        "rollout.filters=[nonzero_std,own_code.py:short]",
        "algo.loss=own_code.py:Loss",
        "algo.off_policy=own_code.py:correction",
        "run.prepare=own_code.py:prepare",
    ]
    cfg = load_config([*argv, *paths], files=False)
    assert code_rows(cfg) == [
        ("algo.loss", f"{own_file}:Loss", line_of(own_file, "class Loss:")),
        ("algo.off_policy", f"{own_file}:correction", line_of(own_file, "def correction")),
        ("reward.name", f"{own_file}:score", line_of(own_file, "def score")),
        ("rollout.filters", f"{own_file}:short", line_of(own_file, "def short")),
        ("run.prepare", f"{own_file}:prepare", str(own_file)),
    ]
    text = render_plan(cfg, make_plan(cfg, LAPTOP), LAPTOP)
    assert f"\nuser code\n  algo.loss        {own_file}:Loss " in text


def test_a_table_entry_of_the_user_is_listed(argv: list[str], own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.FILTERS, "mine", "own_code:short")
    cfg = load_config([*argv, "rollout.filters=[mine]"], files=False)
    assert code_rows(cfg) == [("rollout.filters", "mine", line_of(own_file, "def short"))]


def test_a_run_without_user_code_lists_none(argv: list[str]) -> None:
    assert "user code" not in show_plan(argv)
    assert "user code" not in show_plan(["+recipe=quickstart"]), "run.prepare is a function of this project"


@pytest.mark.parametrize(
    ("extra", "start", "fix"),
    [
        (
            "algo.loss=own_code.py:Loss algo.kl_loss_coef=0.5",
            "algo.kl_loss_coef=0.5 probably has no effect: no code of algo.loss=",
            "apply it there (docs/extending.md), or set algo.kl_loss_coef=0.0",
        ),
        (
            "algo.loss=own_code.py:WithKL algo.kl_loss_coef=0.5 algo.entropy_coef=0.1 algo.use_tis=true",
            "algo.entropy_coef=0.1, algo.use_tis=true probably have no effect: no code of algo.loss=",
            "set algo.entropy_coef=0.0 algo.use_tis=false",
        ),
        (
            "algo.loss=own_code.py:Loss algo.off_policy=own_code.py:correction",
            "algo.off_policy=",
            "set algo.off_policy=importance",
        ),
        (
            "algo.off_policy=own_code.py:correction algo.use_tis=true",
            "algo.use_tis=true probably has no effect: no code of algo.off_policy=",
            "set algo.use_tis=false",
        ),
        (
            "algo.loss=own_code.py:WithCorrection algo.off_policy=own_code.py:correction algo.use_tis=true",
            "algo.use_tis=true probably has no effect: no code of algo.off_policy=",
            "set algo.use_tis=false",
        ),
        (
            "algo=ppo algo.token_advantage=own_code.py:Advantage algo.gamma=0.9 algo.lambd=0.9",
            "algo.lambd=0.9 probably has no effect: no code of algo.token_advantage=",
            "set algo.lambd=1.0",
        ),
        ("algo=dapo algo.loss=own_code.py:Loss algo.eps_clip=0.1", "algo.eps_clip=0.1 probably", "algo.eps_clip=0.2"),
    ],
)
def test_a_key_that_a_user_function_does_not_read_is_named(
    unread: Callable[[str], tuple[str, ...]], extra: str, start: str, fix: str
) -> None:
    (line,) = unread(extra)
    assert line.startswith(start) and line.endswith(fix)


@pytest.mark.parametrize(
    "extra",
    [
        "algo.loss=own_code.py:Loss",
        "algo=dapo algo.loss=own_code.py:Loss",  # eps_clip_high has dapo's default
        "algo.loss=own_code.py:WithKL algo.kl_loss_coef=0.5",
        "algo.loss=own_code.py:Wrapper algo.kl_loss_coef=0.5 algo.entropy_coef=0.1 algo.use_tis=true algo.eps_clip_c=3",
        "algo.loss=own_code.py:WithCorrection algo.use_tis=true",
        "algo.loss=own_code.py:Loss algo.mask_truncated=true algo.aggregation=dr_grpo",  # not applied by a loss
        "algo.kl_loss_coef=0.5 algo.use_tis=true reward.name=own_code.py:score",
    ],
)
def test_no_key_is_named_that_is_applied(unread: Callable[[str], tuple[str, ...]], extra: str) -> None:
    assert unread(extra) == ()


def test_the_plan_has_the_advice(argv: list[str], own_file: Path) -> None:
    text = show_plan([*argv, "algo.loss=own_code.py:Loss", "algo.kl_loss_coef=0.5"])
    assert "\nadvice\n  algo.kl_loss_coef=0.5 probably has no effect" in text


def test_the_keys_exist_and_each_key_of_a_policy_loss_is_listed() -> None:
    listed = {f"algo.{key}" for keys in APPLIED_BY.values() for key in keys}
    assert listed <= set(known_keys())
    depends_on_another = {"tis_clip", "tis_clip_low", "mis_low", "mis_high", "rejection_low", "rejection_high"}
    applied_elsewhere = {
        "name",
        "loss",
        "group_advantage",
        "token_advantage",
        "aggregation",  # data.assemble
        "mask_truncated",
        "mask_offpolicy",
        "routing_replay",  # routers
        "routing_replay_reference",
    }
    keys = {key for key in known_keys() if key.startswith("algo.")}
    assert keys - listed == {f"algo.{key}" for key in depends_on_another | applied_elsewhere}
