"""User functions in ``algo.loss``, ``algo.group_advantage``, ``algo.token_advantage`` and ``algo.off_policy``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from slime_like.algo.advantage import bind_group_advantage
from slime_like.algo.bind import (
    bind_loss,
    bind_token_advantage,
    critic_targets,
    diagnose,
    token_advantages,
)
from slime_like.algo_interfaces import LossOutput, LossView, TokenView
from slime_like.config.load.loader import load_config
from slime_like.config.schema.policy import PolicyConfig
from slime_like.errors import ConfigError, UserCodeError
from tests.algo.simulate import LocalReduce
from tests.config.bad_input import message
from tests.config.own_algorithm import BrokenReturns

OWN = "tests.config.own_algorithm"
FILE = str(Path(__file__).with_name("own_algorithm.py"))
BAD = {
    "loss of two arguments": (f"algo.loss={OWN}:two_arguments", "algo.loss=", "loss(config)", "own_algorithm.py:"),
    "loss of nothing": (f"algo.loss={OWN}:returns_nothing", "returned a NoneType", "(view) -> LossOutput"),
    "loss without entropy": (f"algo.loss={OWN}:without_entropy", "has no needs_entropy", "own_algorithm.py:"),
    "loss that fails": (f"algo.loss={OWN}:fails", "raised ValueError: no such setting", "own_algorithm.py:"),
    "loss of a view": (
        f"algo.loss={OWN}:loss_of_view",
        "raised AttributeError",
        "own_algorithm.py:",
        "loss(config) must return a function, which is called as loss(config)(view) -> LossOutput",
    ),
    "loss that is missing": (f"algo.loss={OWN}:Reinfarce", "has no 'Reinfarce'", "'Reinforce'"),
    "advantage of config": (f"algo.group_advantage={OWN}:halved", "advantage(rewards_G)", "own_algorithm.py:"),
    "correction of rewards": (f"algo.off_policy={OWN}:centred", "correction(config, old_logprobs", "own_algorithm.py:"),
    "token advantage of rewards": (f"algo.token_advantage={OWN}:centred", "raised", "own_algorithm.py:"),
    "token advantage without returns": (
        f"algo=ppo algo.token_advantage={OWN}:ConstantAdvantage",
        "returns(views)",
        "algo=ppo",
    ),
    "token advantage of sft": (
        f"algo=sft rollout.n_samples_per_prompt=1 algo.token_advantage={OWN}:ConstantAdvantage",
        "algo.token_advantage=",
        "algo=sft",
    ),
    "correction of nothing": (f"algo.use_rollout_logprobs=true algo.off_policy={OWN}:halved", "algo.off_policy"),
    "unknown correction": ("algo.off_policy=importanse", "'importance'", "my_file.py:my_function"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_wrong_signature_ends_in_one_message(case: tuple[str, ...], argv: list[str]) -> None:
    extra, *words = case
    text = message(argv, extra, files=False)
    assert all(word in text for word in words), text
    assert "\n" not in text


@pytest.mark.parametrize("source", [OWN, FILE], ids=["dotted", "file"])
def test_user_functions_are_used(source: str, argv: list[str]) -> None:
    keys = {"loss": "Reinforce", "group_advantage": "centred", "token_advantage": "ConstantAdvantage"}
    cfg = load_config([*argv, *(f"algo.{key}={source}:{name}" for key, name in keys.items())], files=False)
    advantage = bind_token_advantage(cfg.algo)
    assert advantage is not None and cfg.algo.group_advantage is not None
    assert bind_group_advantage(cfg.algo.group_advantage)(np.array([0, 1], dtype=np.float32)).tolist() == [-0.25, 0.25]
    (column,) = token_advantages(cfg.algo, advantage, [token_view()], LocalReduce())
    assert column.tolist() == [0.0, 0.5, 0.5]
    output = bind_loss(cfg.algo)(loss_view(torch.tensor([2.0, -1.0])))
    assert output.loss.tolist() == [2.0, -1.0]


@pytest.mark.parametrize("source", [OWN, Path(FILE).name], ids=["dotted", "file of the current directory"])
def test_a_user_correction_weighs_the_loss(source: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(FILE).parent)
    plain = load_config(argv, files=False).algo
    with_correction = load_config([*argv, f"algo.off_policy={source}:halved"], files=False).algo
    assert isinstance(with_correction, PolicyConfig)
    losses = [bind_loss(algo)(loss_view(torch.tensor([2.0, -1.0]))).loss for algo in (plain, with_correction)]
    assert losses[1].tolist() == (losses[0] / 2).tolist()


def test_a_loss_of_another_shape_is_named(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loss = bind_loss(load_config([*argv, f"algo.loss={OWN}:Reinforce"], files=False).algo)
    total, per_token = torch.tensor(1.0), torch.ones(2)
    for loss_output, words in (
        (LossOutput(total, {}, {}), r"loss \(\) .*one loss per token"),
        (LossOutput(cast(Any, 1.0), {}, {}), "loss float"),
        (LossOutput(per_token, {"kl": total}, {"ratio": total}), r"means\['kl'\] \(\), maxima\['ratio'\] \(\) for"),
        (
            LossOutput(per_token, {"kl": cast(Any, 0.5)}, {}),
            r"means\['kl'\] float .*tensors of the same shape in means",
        ),
    ):
        monkeypatch.setattr("tests.config.own_algorithm.Reinforce.__call__", lambda self, view, out=loss_output: out)
        with pytest.raises(UserCodeError, match=rf"algo\.loss=.*returned {words}"):
            loss(loss_view(torch.tensor([1.0, 1.0])))
    with pytest.raises(UserCodeError, match=r"algo\.group_advantage=.*one finite number per reward"):
        bind_group_advantage(f"{OWN}:one_number")(np.array([0, 1], dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", r"raised ValueError: no ratio \(.*own_algorithm.py:\d+\), for a micro-batch of 2 tokens"),
        ("unweighted", r"returned Tensor for .*: return Correction\(weight, keep, means\), .*shape \(2,\) or None"),
        ("one_weight", r"returned \[\(\), None\] for .*: return Correction"),
        ("number", r"returned \['float', None\] for .*: return Correction"),
    ],
)
def test_an_error_in_a_correction_names_key_and_function(name: str, words: str, argv: list[str]) -> None:
    loss = bind_loss(load_config([*argv, f"algo.off_policy={OWN}:{name}"], files=False).algo)
    with pytest.raises(UserCodeError, match=rf"^algo\.off_policy={OWN}:{name} {words}"):
        loss(loss_view(torch.tensor([1.0, 1.0])))


def test_an_error_in_critic_targets_or_diagnostics_names_key_and_function(argv: list[str]) -> None:
    extra = ["algo=ppo", f"algo.token_advantage={OWN}:BrokenReturns"]
    algo = load_config([*argv, *extra], files=False).algo
    advantage = bind_token_advantage(algo)
    assert isinstance(advantage, BrokenReturns)
    with pytest.raises(
        UserCodeError, match=rf"^algo\.token_advantage={OWN}:BrokenReturns raised ValueError: no targets"
    ):
        critic_targets(algo, advantage, [token_view()])
    with pytest.raises(UserCodeError, match=r"raised ValueError: no numbers"):
        diagnose(algo, advantage, [token_view()], LocalReduce())


def test_an_error_in_a_user_module_names_its_line(argv: list[str], tmp_path: Path) -> None:
    for code, words in (("x = = 1\n", "SyntaxError"), ("\nraise KeyError('x')\n", "KeyError")):
        file = tmp_path / f"{words}.py"
        file.write_text(code)
        text = message(argv, f"algo.loss={file}:Loss", files=False)
        assert words in text and f"{file}:{code.count(chr(10))}" in text and "\n" not in text


def test_code_false_does_not_import_user_modules(argv: list[str]) -> None:
    load_config([*argv, "algo.loss=no_such_module:Loss"], files=False, code=False)
    with pytest.raises(ConfigError, match="no_such_module"):
        load_config([*argv, "algo.loss=no_such_module:Loss"], files=False)


def loss_view(advantages: torch.Tensor) -> LossView:
    logprobs, weight = torch.full_like(advantages, -1.0), torch.ones_like(advantages)
    return LossView(logprobs, None, weight, advantages, None, logprobs, None)


def token_view() -> TokenView:
    weight = torch.tensor([0.0, 1.0, 1.0])
    return TokenView(torch.tensor([0, 3]), weight, torch.tensor([1.0]), None, weight, None, None)
