"""Every bad input ends in one message that names key or file, value and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.load.loader import load_config
from tests.config.bad_input import each_rule, message, one_message

# extra arguments, then words that the message must contain
KEYS = {
    "unknown key": ("rollout.bach_size=3", "rollout.bach_size=3", "'rollout.batch_size'"),
    "unknown key with plus": ("+rollout.foo=1", "rollout.foo=1", "rollout has batch_size"),
    "unknown group": ("rolout.batch_size=1", "rolout.batch_size=1", "'rollout.batch_size'"),
    "nothing near": ("xyz=1", "xyz=1", "the groups are model, parallel"),
    "key without group": ("batch_size=3", "batch_size=3", "'rollout.batch_size'"),
    "group instead of key": ("rollout=3", "rollout=3", "rollout.batch_size"),
    "key of another algorithm": (
        "algo=dr_grpo algo.kl_coef=1",
        "algo.kl_coef=1",
        "algo=reinforce_pp",
        ": remove algo.kl_coef, or choose one of these algorithms",
    ),
    "key of a single algorithm": ("algo.lambd=1", "only under algo=ppo", "remove algo.lambd, or choose algo=ppo"),
    "key of another algorithm in a recipe": (
        "+recipe=quickstart algo=sft",
        "algo.kl_loss_coef (in configs/recipe/quickstart.yaml) exists only under algo=grpo",
        "ignore the recipe's setting with '~algo.kl_loss_coef', or choose one of these algorithms",
    ),
    "unknown algorithm": ("algo=grop", "algo=grop", "'grpo'"),
    "unknown recipe": ("+recipe=quickstrat", "+recipe=quickstrat", "'quickstart'"),
    "no override": ("rollout", "'rollout'", "key=value"),
    "removal": (
        "~rollout.batch_size",
        "~rollout.batch_size",
        "remove '~rollout.batch_size', or set rollout.batch_size",
    ),
    "removal of a value": ("~rollout.batch_size=3", "write '~rollout.batch_size',"),
    "unknown recipe of a list": ("+recipe=[quickstart,mine]", "recipe/mine is unknown", "there is no recipe/mine.yaml"),
    "several recipes": (
        "+recipe=quickstart,mine",
        "+recipe=quickstart,mine",
        "write +recipe=NAME, or +recipe=[NAME,NAME]",
    ),
    "incomplete list": ("+recipe=[quickstart", "+recipe=[quickstart is not a name"),
    "number as a recipe": ("+recipe=[1]", "+recipe=[1] is not a name"),
    "several algorithms": ("algo=[grpo,ppo]", "algo=[grpo,ppo] is not a name: write algo=NAME"),
    "removal of a group": ("+recipe=quickstart ~guard", "~guard: guard cannot be removed", "guard=NAME"),
    "removal from an unknown recipe": ("+recipe=quickstrat ~algo.eps_clip", "+recipe=quickstrat", "'quickstart'"),
    "hydra's own": ("hydra.run.dir=x", "hydra.run.dir=x", "--config-dir"),
    "no such folder": ("--config-dir=/no/such", "--config-dir /no/such", "DIR/recipe"),
    "word for a number": ("rollout.batch_size=abc", "rollout.batch_size=abc", "a whole number", "default 32"),
    "fraction": ("parallel.tp=1.5", "parallel.tp=1.5", "a whole number"),
    "null": ("model.dtype=null", "model.dtype=null", "default auto"),
    "empty": ("run.seed=", "run.seed=", "a whole number"),
    "number for a list": ("rollout.filters=3", "rollout.filters=3", "[a,b]"),
    "number for a mapping": ("rollout.sglang=3", "rollout.sglang=3", "{name: value}"),
    "sweep": ("rollout.batch_size=1,2", "rollout.batch_size=1,2", "[1,2]"),
    "unbalanced": ("rollout.stop_token_ids=[1", "rollout.stop_token_ids=[1", "quote"),
    "choice": ("placement.mode=splt", "placement.mode='splt'", "'split'"),
    "environment": ("run.name=${oc.env:NO_SUCH_VARIABLE}", "run.name", "'NO_SUCH_VARIABLE' not found"),
    "algorithm by its name": ("algo.name=dr_grpo", "algo.name='dr_grpo'", "algo=dr_grpo"),
    "no algorithm": (
        "algo.name=mine",
        "remove it, and choose the algorithm with algo=NAME; 'mine' is not one of grpo, dr_grpo",
        "(your own: add it to ALGORITHMS in slime_like/config/schema/names.py",
    ),
}


@each_rule(KEYS)
def test_the_message_names_key_value_and_fix(case: tuple[str, ...], argv: list[str]) -> None:
    one_message(case, argv)


def test_missing_keys_are_named_with_their_flags() -> None:
    text = message([], "", files=False)
    for word in ("model.hf_checkpoint must be given", "--hf-checkpoint", "data.train must be given", "--prompt-data"):
        assert word in text
    assert "+recipe=quickstart" in text


def test_rollout_only_may_cut_the_distribution(argv: list[str]) -> None:
    cfg = load_config([*argv, "run.mode=rollout_only", "rollout.top_p=0.9", "rollout.n_samples_per_prompt=1"])
    assert cfg.rollout.top_p == 0.9


def test_a_recipe_with_a_mistake_is_named(tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "recipe").mkdir()
    for name, text, words in (
        (
            "a",
            "rollout: {bach_size: 3}",
            [f"(in {tmp_path}/recipe/a.yaml)", "rollout.bach_size", "'rollout.batch_size'"],
        ),
        ("b", "rollout: {batch_size: x}", [f"(in {tmp_path}/recipe/b.yaml)", "rollout.batch_size", "a whole number"]),
        ("c", "rollout: [", ["recipe/c.yaml ", "cannot be read as YAML"]),
        ("d", "defaults: [absent]", [f"recipe/absent (in {tmp_path}/recipe/d.yaml) is unknown"]),
    ):
        (tmp_path / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
        error = message(argv, f"--config-dir={tmp_path} +recipe={name}", files=False)
        assert all(word in error for word in words), error


@pytest.mark.parametrize("chosen", ["bad", "[good,bad]", "includes", "[good,includes]"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: \xff", "cannot be read as UTF-8"),
        (b"rollout: [", "cannot be read as YAML"),
        (b"text", "is not a mapping of keys to settings"),
        (b"- 1", "is not a mapping of keys to settings"),
        (None, "is missing"),  # a link to nothing
    ],
)
def test_an_unreadable_recipe_is_named(
    content: bytes | None, words: str, chosen: str, tmp_path: Path, argv: list[str]
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "good.yaml").write_text("# @package _global_\noptim: {lr: 0.25}\n")
    (tmp_path / "recipe" / "includes.yaml").write_text("# @package _global_\ndefaults: [bad, _self_]\n")
    bad = tmp_path / "recipe" / "bad.yaml"
    if content is None:
        bad.symlink_to("nowhere")
    else:
        bad.write_bytes(content)
    error = message(argv, f"--config-dir={tmp_path} +recipe={chosen}", files=False)
    assert error.startswith(f"{bad} {words}") and "; correct it" in error
