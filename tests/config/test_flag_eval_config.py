"""slime's --eval-config: datasets, defaults and overrides become evaluation datasets; unsupported fields are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError
from slime_like_compat.conversion import NONE, SAME
from slime_like_compat.flags.eval_config import eval_config_overrides
from slime_like_compat.slime.job import convert_script

SETS: dict[str, Any] = {
    "eval": {
        "defaults": {"max_response_len": 16384, "top_p": 0.7, "stop": None},
        "datasets": [
            {"name": "aime", "path": "/d/aime.jsonl", "rm_type": "deepscaler", "n_samples_per_eval_prompt": 16},
            {"name": "gpqa", "path": "/d/gpqa.jsonl@[0:50]", "rm_type": "gpqa", "top_p": 1.0, "metadata_overrides": {}},
        ],
    }
}
SCRIPT = (
    "python3 train.py --hf-checkpoint m --prompt-data d.jsonl --num-rollout 10 --rollout-batch-size 8 --rm-type math "
    "--n-samples-per-prompt 4 --attention-dropout 0.0 --hidden-dropout 0.0 --eval-interval 5 --eval-config "
)


def write_sets(folder: Path, content: object) -> Path:
    path = folder / "sets.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("by_name", [True, False])
def test_settings_of_a_dataset_override_the_defaults(by_name: bool, tmp_path: Path) -> None:
    tree: dict[str, Any] = SETS["eval"]
    if by_name:
        tree = tree | {"datasets": {item["name"]: item | {"name": item["name"]} for item in tree["datasets"]}}
    path = write_sets(tmp_path, tree if by_name else SETS)
    line = [
        "data.train=d",
        "model.hf_checkpoint=m",
        "reward.name=math",
        "loop.num_rollout=5",
        "--eval-config",
        str(path),
    ]
    cfg = load_config([*line, "rollout.max_context_len=32768", "--eval-prompt-data", "a", "b.jsonl"], files=False)
    assert cfg.evaluation.datasets == {"aime": "/d/aime.jsonl", "gpqa": "/d/gpqa.jsonl@[0:50]"}
    assert cfg.evaluation.overrides == {
        "aime": {"max_response_len": 16384, "top_p": 0.7, "rm_type": "deepscaler", "n_samples_per_prompt": 16},
        "gpqa": {"max_response_len": 16384, "top_p": 1.0, "rm_type": "gpqa"},
    }


def test_the_file_may_be_in_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_sets(tmp_path, SETS)
    assert list(eval_config_overrides(Path("~") / path.name)) == list(eval_config_overrides(path))


REFUSED: dict[str, tuple[object, str]] = {
    "no mapping": ([1], "is not a mapping"),
    "no sets": ({"eval": {"defaults": {}}}, "names no datasets"),
    "no path": ({"datasets": [{"name": "a"}]}, "needs a name .* and a path"),
    "a name with a slash": ({"datasets": [{"name": "a/b", "path": "x"}]}, "needs a name"),
    "no set": ({"datasets": ["a"]}, "needs a name"),
    "defaults": ({"defaults": 3, "datasets": [{"name": "a", "path": "x"}]}, "defaults=3"),
    "another field": (
        {"datasets": [{"name": "a", "path": "x", "stop": ["END"]}]},
        r"a\.stop=\['END'\], which has no equivalent here",
    ),
    "metadata": ({"datasets": [{"name": "a", "path": "x", "metadata_overrides": {"s": 1}}]}, r"a\.metadata_overrides"),
    "of a default": ({"defaults": {"min_new_tokens": 3}, "datasets": [{"name": "a", "path": "x"}]}, "min_new_tokens=3"),
    "a reference": ({"datasets": [{"name": "a", "path": "${root}/x"}]}, r"a\.path=.*a reference"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_without_a_counterpart_are_named(name: str, tmp_path: Path) -> None:
    content, words = REFUSED[name]
    path = write_sets(tmp_path, content)
    with pytest.raises(ConfigError, match=rf"--eval-config: {path} .*{words}"):
        list(eval_config_overrides(path))


def test_a_script_with_an_eval_config_converts_if_the_file_exists(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    path = write_sets(tmp_path, SETS)
    script.write_text(f'HERE="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"\n{SCRIPT} "$HERE/sets.yaml"')
    line = [str(script), str(tmp_path / "recipe" / "a.yaml")]
    missing = convert_script(script, tmp_path / "recipe" / "b.yaml", variables={"HERE": "/nowhere"})
    assert missing.code == NONE and "/nowhere/sets.yaml is missing" in missing.problem
    converted = convert_script(*map(Path, line))
    assert converted.code == SAME, converted.problem
    cfg = load_config(["--config-dir", str(tmp_path), "+recipe=a"], files=False, machine=False)
    assert cfg.evaluation.overrides["aime"]["n_samples_per_prompt"] == 16
    assert (cfg.evaluation.temperature, cfg.evaluation.top_p) == (1.0, 1.0), (
        "slime samples evaluation prompts like training prompts"
    )
    assert str(path) in converted.report
