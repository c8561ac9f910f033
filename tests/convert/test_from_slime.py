"""A launch script of slime becomes a recipe that composes and plans; its table leaves no flag out."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.machine import Machine
from slime_like.cluster.plan import make_plan
from slime_like.cluster.plan_view import show_plan
from slime_like.config.files import check_files
from slime_like.config.flag_defaults import DEFAULTS
from slime_like.config.flag_table import ALWAYS, COMBINED, LISTS, REFUSED, SWITCHES, VALUES
from slime_like.config.flags import translate
from slime_like.config.known import known_keys
from slime_like.config.load import load_config
from slime_like.config.root import TrainConfig
from slime_like.convert import recipe_file
from slime_like.convert.check import check_folder
from slime_like.convert.flag_mapping import map_arguments
from slime_like.convert.flag_rows import row_of
from slime_like.convert.flag_special import CODE as CODE_FLAGS
from slime_like.convert.flag_special import SPECIAL
from slime_like.convert.given import Flags, grouped
from slime_like.convert.launch_script import read_launch
from slime_like.convert.rows import Mapped, Row
from slime_like.convert.shell_values import Value
from slime_like.convert.slime_job import CODE, NONE, SAME, convert_script
from slime_like.errors import ConfigError
from tests.config.model_folder import write_model

ROOT = Path(__file__).parents[2]
FIXTURE = Path(__file__).parent / "slime" / "run-qwen3.5-35B-A3B-flashqla.sh"
NODE = Machine(8, 96, 2048 * 2**30, ("NVIDIA H200",) * 8)
QWEN35_35B: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
NEEDED = (
    "--hf-checkpoint m --prompt-data d.jsonl --num-rollout 10 --rollout-batch-size 8 --n-samples-per-prompt 4 "
    "--attention-dropout 0.0 --hidden-dropout 0.0"
)


def mapped(folder: Path, line: str, *, asynchronous: bool = False, drop: Sequence[str] = ()) -> Mapped:
    script = folder / "run.sh"
    script.write_text(f"python3 train.py {NEEDED} \\\n {line}")
    return map_arguments(read_launch(script, given={}).arguments, run_name="a", asynchronous=asynchronous, drop=drop)


def composed(folder: Path, line: str, **options: Any) -> TrainConfig:
    """The configuration of a job that converts."""
    found = mapped(folder, line, **options)
    assert found.config is not None, found.blocked
    return found.config


def row(found: Mapped, flag: str) -> Row:
    return next(row for row in reversed(found.rows) if row.flag == flag)


def test_the_flashqla_run_composes_and_plans(tmp_path: Path) -> None:
    root = tmp_path / "models"
    folder = write_model(root / "Qwen3.5-35B-A3B", **QWEN35_35B)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("dapo-math-17k", "aime-2024"):
        (root / "data" / name).mkdir(parents=True)
        (root / "data" / name / f"{name}.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 30)
    out = tmp_path / "mine" / "recipe" / "flashqla.yaml"
    line = [sys.executable, "scripts/from_slime.py", str(FIXTURE), "--out", str(out), "--set", f"MODEL_ROOT={root}"]
    ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    cfg = load_config(["--config-dir", str(out.parent.parent), "+recipe=flashqla"], files=False, machine=False)
    check_files(cfg)
    layout = make_plan(cfg, NODE).actor.layout
    assert (layout.tp, layout.cp, layout.ep, layout.dp, layout.pp) == (2, 4, 8, 1, 1)
    assert (cfg.rollout.max_response_len, cfg.rollout.tp, cfg.rollout.num_engines) == (8192, 8, 1)
    assert (cfg.model.gdn.backend, cfg.model.recompute, cfg.optim.cpu_offload) == ("flashqla", "full", True)
    assert cfg.data.train.endswith("dapo-math-17k/dapo-math-17k.jsonl")
    assert cfg.reward.name == "deepscaler"
    assert cfg.algo.aggregation == "sequence_mean", "slime's default, written out"
    assert cfg.evaluation.temperature == 1.0, "slime samples held-out prompts as it samples others"
    for text in (
        "--use-dynamic-batch-size",
        "--calculate-per-token-loss off",
        "+recipe=flashqla --plan",
    ):
        assert text in ran.stdout
    shown = show_plan(["--config-dir", str(out.parent.parent), "+recipe=flashqla"], "8xNVIDIA H200")
    assert "8 GPUs (NVIDIA H200)" in shown and "8 x (tp 2 * pp 1 * cp 4 * dp 1, experts over 8)" in shown
    assert "256 = global_batch_size 256" in shown and "1 x (tp 8 each" in shown
    with pytest.raises(ConfigError, match=r"flashqla\.yaml exists.*--force"):
        convert_script(FIXTURE, out, given={"MODEL_ROOT": str(root)})
    with pytest.raises(ConfigError, match="folder named recipe"):
        convert_script(FIXTURE, tmp_path / "a.yaml", given={"MODEL_ROOT": str(root)})


def test_every_flag_of_a_script_has_one_row() -> None:
    launch = read_launch(FIXTURE, given={"MODEL_ROOT": "/models"})
    found = map_arguments(launch.arguments, run_name="a", asynchronous=False)
    flags = [value.text for value in launch.arguments if value.text.startswith("--")]
    rows = [row for row in found.rows if row.where]
    assert sorted(row.flag for row in rows) == sorted(flags)
    assert [row.flag for row in found.rows if row.verdict == "unknown"] == []
    assert row(found, "--moe-layer-freq").given == "?", "computed by the script, and not needed"
    assert all(item.keys or item.note for item in found.rows)
    assert {item.verdict for item in rows if item.flag in ("--swiglu", "--num-layers", "--spec")} == {"dropped"}


def test_a_flag_of_ones_own_is_unknown_and_shown(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"OWN=(--my-own-flag 7)\npython3 train.py {NEEDED} ${{OWN[@]}}")
    out = tmp_path / "recipe" / "own.yaml"
    done = convert_script(script, out)
    assert [row.flag for row in done.rows if row.verdict == "unknown"] == ["--my-own-flag"]
    assert (done.code, out.exists()) == (NONE, False)
    assert "--my-own-flag 7" in done.report and "--drop=--my-own-flag" in done.problem
    assert convert_script(script, out, drop=["--my-own-flag"]).code == SAME
    assert out.exists()


ROWS = {
    "--kl-loss-coef 0.1": ("--kl-loss-coef", "dropped", "without --use-kl-loss"),
    "--use-kl-loss --kl-loss-coef 0.1 --ref-load r": ("--ref-load", "mapped", ""),
    "--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type k1": (
        "--kl-loss-type",
        "dropped",
        "without --kl-loss-coef above 0",
    ),
    "--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl": ("--kl-loss-type", "mapped", ""),
    "--use-kl-loss --kl-loss-coef 0.10 --kl-loss-type k3": ("--kl-loss-type", "mapped", ""),
    "--rm-type nonesuch": ("--rm-type", "refused", "no reward of this name"),
    "--custom-rm-path tests.reward.rewards_of_users:even --rm-type math": ("--rm-type", "dropped", "--custom-rm-path"),
    "--rm-type boxed_math": ("--rm-type", "mapped", ""),
    "--tis-clip 3": ("--tis-clip", "dropped", "--use-tis"),
    "--custom-rm-path nowhere.at_all.fn": ("--custom-rm-path", "code", "cannot be imported"),
    "--sglang-cuda-graph-bs 1 2": ("--sglang-cuda-graph-bs", "mapped", "sglang"),
    "--sglang-tp-size 2": ("--sglang-tp-size", "refused", "rollout.tp"),
    "--colocate --sglang-mem-fraction-static 0.8": ("--sglang-mem-fraction-static", "mapped", "--plan"),
    "--update-weight-mode delta": ("--update-weight-mode", "dropped", "sends all weights"),
    "--optimizer adam": ("--optimizer", "always", "AdamW"),
    "--optimizer muon": ("--optimizer", "refused", "AdamW"),
    "--update-weights-interval 2": ("--update-weights-interval", "refused", "every rollout"),
    "--custom-generate-function-path nowhere.fn": ("--custom-generate-function-path", "code", "PYTHONPATH"),
    "--custom-generate-function-path fn": ("--custom-generate-function-path", "refused", "dotted path"),
    "--dynamic-sampling-filter-path nowhere.fn": ("--dynamic-sampling-filter-path", "code", "PYTHONPATH"),
    "--custom-loss-function-path a.b": ("--custom-loss-function-path", "refused", "docs/algorithms.md"),
    "--loss-type custom_loss": ("--loss-type", "refused", "docs/algorithms.md"),
    "--use-tis --custom-tis-function-path a.b": ("--custom-tis-function-path", "refused", "docs/algorithms.md"),
    "--custom-advantage-function-path a.b": ("--custom-advantage-function-path", "refused", "docs/algorithms.md"),
    "--custom-pg-loss-reducer-function-path a.b": ("--custom-pg-loss-reducer-function-path", "refused", ""),
    "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async": (
        "--rollout-function-path",
        "refused",
        "loop.max_staleness",
    ),
    "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout": ("--rollout-function-path", "always", ""),
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout": ("--rollout-function-path", "refused", ""),
    "--disable-compute-advantages-and-returns": ("--disable-compute-advantages-and-returns", "refused", "sft"),
    "--ref-load /a/m_torch_dist": ("--ref-load", "dropped", "no KL"),
    "--ref-load /a/m-sft_torch_dist": ("--ref-load", "mapped", "the policy starts from them"),
    "--num-layers 4": ("--num-layers", "refused", "gated"),
    "--num-layers 4 --swiglu": ("--num-layers", "dropped", "config.json"),
    "--position-embedding-type none": ("--position-embedding-type", "refused", "rotary"),
    "--post-self-attn-layernorm": ("--post-self-attn-layernorm", "refused", "after attention"),
    "--opd-teacher-load /m/T_torch_dist": ("--opd-teacher-load", "refused", "HF folder"),
    "--save c --ref-load m_torch_dist --load m_torch_dist": ("--load", "dropped", "--ref-load"),
    "--num-epoch 2": ("--num-epoch", "dropped", "--num-rollout"),
    '--train-env-vars \'{"NCCL_DEBUG":"INFO"}\'': ("--train-env-vars", "dropped", "where train.py is started"),
    '--train-env-vars \'{"FAKE_QUANT":"1"}\'': ("--train-env-vars", "refused", "not known"),
    "--rollout-max-context-len 4096 --eval-max-context-len 4096": ("--eval-max-context-len", "always", ""),
    "--rollout-max-prompt-len 2048": ("--rollout-max-prompt-len", "mapped", "left out"),
    "--eval-config nowhere.yaml": ("--eval-config", "refused", "nowhere.yaml is missing"),
    "--eval-config nowhere.yaml --eval-prompt-data a b.jsonl": ("--eval-prompt-data", "dropped", "--eval-config"),
    "--eval-max-context-len 99": ("--eval-max-context-len", "refused", "rollout.max_context_len"),
    "--rollout-num-gpus-per-engine 2 --sglang-dp-size 2 --sglang-enable-dp-attention": (
        "--sglang-dp-size",
        "mapped",
        "",
    ),
    "--multi-latent-attention": ("--multi-latent-attention", "refused", "no model family"),
    "--spec slime_plugins.models.glm4 get_glm_spec": ("--spec", "refused", "no model family"),
    "--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec": ("--spec", "dropped", "config.json"),
    "--moe-router-score-function sigmoid": ("--moe-router-score-function", "refused", "softmax"),
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0": (
        "--moe-router-load-balancing-type",
        "dropped",
        "--moe-aux-loss-coeff",
    ),
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1": (
        "--moe-router-load-balancing-type",
        "refused",
        "aux_loss",
    ),
    "--hf-checkpoint /m/Qwen3-4B-FP8/": ("--hf-checkpoint", "refused", "quantised"),
    "--hf-checkpoint /m/Kimi-W4A16": ("--hf-checkpoint", "refused", "quantised"),
    "--save-debug-rollout-data /d/{rollout_id}.pt": ("--save-debug-rollout-data", "mapped", "run.dir/rollouts"),
    "--data-source-path slime.rollout.data_source.RolloutDataSourceWithBuffer": ("--data-source-path", "always", ""),
    "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 0": ("--rollout-num-gpus-per-engine", "refused", "1 or more"),
    "--tool-key tools": ("--tool-key", "always", "column"),
    "--tool-key functions": ("--tool-key", "refused", "column"),
    "--num-rollout 10": ("--tool-key", "default", "column"),
    "--colocate -x": ("-x", "unknown", "python train.py --help"),
    "--colocate --sglang-log-level -x=3": ("-x", "unknown", "python train.py --help"),
    "--rollout-btach-size 3": ("--rollout-btach-size", "unknown", "'--rollout-batch-size'"),
    "--advantage-estimator gspo --eps-clip 3e-4": ("--eps-clip-high", "default", ""),
    "--actor-num-nodes 2 --actor-num-gpus-per-node 8": ("ray job submit", "mapped", "cluster"),
}


@pytest.mark.parametrize(("line", "expected"), ROWS.items(), ids=list(ROWS))
def test_what_becomes_of_a_flag(line: str, expected: tuple[str, str, str], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {NEEDED} \\\n {line}")
    given = Flags.of(grouped(read_launch(script, given={}).arguments))
    flag, verdict, words = expected
    found = row_of(given.last[flag], given) if flag in given else row(mapped(tmp_path, line), flag)
    assert (found.verdict, words in found.note) == (verdict, True), found


def test_of_a_flag_that_is_given_twice_the_last_counts(tmp_path: Path) -> None:
    found = mapped(tmp_path, "--lr 1e-5 --lr 2e-5")
    assert [row.note.split(" at ")[0] for row in found.rows if row.flag == "--lr"] == ["given again", ""]
    assert found.config is not None and found.config.optim.lr == 2e-5


def test_defaults_of_slime_are_kept(tmp_path: Path) -> None:
    cfg = composed(tmp_path, "--rollout-temperature 0.7 --eval-interval 1 --eval-prompt-data a b.jsonl")
    assert (cfg.data.input_key, cfg.data.shuffle, cfg.run.seed) == ("input", False, 1234)
    assert (cfg.optim.schedule, cfg.optim.weight_decay, cfg.optim.beta2) == ("linear", 0.01, 0.999)
    assert (cfg.evaluation.temperature, cfg.algo.aggregation) == (0.7, "sequence_mean")
    gspo = composed(tmp_path, "--advantage-estimator gspo --eps-clip 3e-4")
    assert (getattr(gspo.algo, "eps_clip_high", 0), gspo.algo.aggregation) == (None, "sequence_mean")
    kinds = [composed(tmp_path, f"--use-kl-loss {coef}").algo for coef in ("", "--kl-loss-coef 0.1")]
    assert [getattr(algo, "kl_loss_type", "") for algo in kinds] == ["low_var_kl", "k1"], "slime's where there is a KL"
    assert composed(tmp_path, "--rollout-num-gpus 1", asynchronous=True).loop.max_staleness == 1
    assert {item.key for item in DEFAULTS} <= set(known_keys())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--lr 1 2", ["run.sh:2", "'2'", "belongs to no flag"]),
        ("--sglang-mem-fraction-static abc --colocate --actor-num-gpus-per-node 8", ["mem_fraction_static", "abc"]),
        ("--actor-num-nodes 0 --colocate --actor-num-gpus-per-node 8", ["--actor-num-nodes 0", "1 or more"]),
        ("--actor-num-gpus-per-node 0 --colocate", ["--actor-num-gpus-per-node 0", "1 or more"]),
        ("--apply-chat-template-kwargs '{\"a\": NaN}'", ["--apply-chat-template-kwargs", "NaN", "expected JSON"]),
        ("--global-batch-size 7", ["loop.global_batch_size", "run.sh:2: --global-batch-size 7", "--drop FLAG"]),
    ],
)
def test_what_no_recipe_says_names_the_line(line: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        mapped(tmp_path, line)
    assert all(word in str(caught.value) for word in words), caught.value
    flag = line.split(" ")[0]
    assert "by --drop" in [row.note for row in mapped(tmp_path, line, drop=[flag]).rows if row.flag == flag]


RECIPE = ("# @package _global_", "data: {train: d.jsonl}", "model: {hf_checkpoint: other}", "reward: {name: math}")
ODD = ("0", "null", "text", "[]", "{}", "", "nan", "-1", "[" * 2000, "1" * 400)


def test_no_value_of_a_flag_is_a_traceback(tmp_path: Path) -> None:
    base = [Value(text, "run.sh:1") for text in f"{NEEDED} --colocate --actor-num-gpus-per-node 8".split()]
    flags = dict.fromkeys([*VALUES, *LISTS, *SWITCHES, *COMBINED, *ALWAYS, *REFUSED, *SPECIAL, *CODE_FLAGS])
    flags |= dict.fromkeys(
        ("--sglang-mem-fraction-static", "--sglang-json-model-override-args", "--moe-aux-loss-coeff")
    )
    assert len(flags) > 300
    for flag, text in itertools.product(flags, ODD):
        given = grouped([*base, Value(flag, "run.sh:2"), Value(text, "run.sh:2")])
        with contextlib.suppress(ConfigError):
            found = row_of(given[-1], Flags.of(given))
            if found.verdict in ("mapped", "code"):
                translate([text for item in given for text in item.argv])


@pytest.mark.parametrize("text", ["[1]", "3", "null"])
def test_variables_that_are_no_mapping_are_refused(text: str, tmp_path: Path) -> None:
    assert row(mapped(tmp_path, f"--train-env-vars {text}"), "--train-env-vars").verdict == "refused"


@pytest.mark.parametrize("config", ["3", "[1]", "{"])
def test_a_model_whose_config_is_damaged_is_left_to_load(config: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    assert row(mapped(tmp_path, f"--hf-checkpoint {tmp_path}/model"), "--hf-checkpoint").verdict == "mapped"


def test_a_recipe_that_does_not_compose_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {NEEDED}")
    out = tmp_path / "recipe" / "a.yaml"
    out.parent.mkdir()
    out.write_text("a recipe of before")
    with monkeypatch.context() as patch:
        patch.setattr(recipe_file, "recipe_text", lambda *_: "\n".join(RECIPE))
        with pytest.raises(ConfigError, match="does not compose"):
            convert_script(script, out, force=True)
    assert out.read_text() == "a recipe of before"


FOLDER = Path(__file__).parent / "slime"
KINDS = {
    "run-sft.sh": (SAME, {"--num-epoch": "mapped", "--rollout-function-path": "always", "train_async.py": "always"}),
    "run-agent.sh": (
        CODE,
        {"--custom-generate-function-path": "code", "--custom-rm-path": "code", "--rm-type": "dropped"},
    ),
    "run-moe-8nodes.sh": (
        SAME,
        {"--sglang-dp-size": "mapped", "--ref-load": "mapped", "--moe-grouped-gemm": "dropped"},
    ),
    "run-fp8.sh": (NONE, {"--hf-checkpoint": "refused", "--fp8-format": "refused"}),
    "run-fault-tolerance.sh": (SAME, {"--use-fault-tolerance": "mapped", "--update-weight-mode": "dropped"}),
    "run-fully-async.sh": (NONE, {"--rollout-function-path": "refused", "--custom-tis-function-path": "refused"}),
    "run-own-loss.sh": (NONE, {"--custom-loss-function-path": "refused", "--my-own-flag": "unknown"}),
}
OUTCOMES: dict[str, dict[str, Any]] = {
    "run-sft.sh": {
        "algo.name": "sft",
        "loop.num_epoch": 3,
        "loop.steps_per_rollout": 2,
        "rollout.n_samples_per_prompt": 1,
        "data.conversation": "whole",
        "run.mode": "train_only",
        "loop.max_staleness": 0,
    },
    "run-agent.sh": {
        "rollout.generate": "my_search_agent.generate:generate",
        "reward.name": "my_search_agent.reward:score",
        "evaluation.datasets": {"aime": "/data/heldout.jsonl"},
        "evaluation.max_response_len": 16384,
        "rollout.num_engines": 8,
        "loop.steps_per_rollout": 4,
    },
    "run-moe-8nodes.sh": {
        "rollout.sglang": {"attn_dp_size": 4, "ep_size": 16},
        "rollout.num_engines": 4,
        "model.megatron_checkpoint": "/m/Moe-30B-tuned_torch_dist",
        "placement.ray_address": "auto",
        "rollout.filters": ["nonzero_std"],
    },
    "run-fault-tolerance.sh": {
        "health.on_dead_engine": "restart",
        "loop.max_staleness": 1,
        "placement.mode": "split",
        "rollout.num_engines": 2,
        "model.hf_checkpoint": "/m/Model-4B",
        "run.resume": "auto",
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_scripts_of_every_kind_become_the_same_job_or_none(name: str, tmp_path: Path) -> None:
    code, verdicts = KINDS[name]
    out = tmp_path / "recipe" / "a.yaml"
    done = convert_script(FOLDER / name, out)
    assert done.code == code, done.problem or done.report
    assert {flag: next(r.verdict for r in done.rows if r.flag == flag) for flag in verdicts} == verdicts
    assert out.exists() == (code != NONE)
    if code == NONE:
        drops = done.problem.rpartition("add: ")[2].split()
        refused = {flag for flag, verdict in verdicts.items() if verdict == "refused"}
        assert {f"--drop={flag}" for flag in refused - {"--hf-checkpoint"}} <= {*drops}
        assert "--drop=--hf-checkpoint" not in drops, "a job without a model is none"
        assert ("without the others" in done.problem) == ("--hf-checkpoint" in refused)
        return
    command = ["--config-dir", str(tmp_path), "+recipe=a"]
    cfg = load_config(command, files=False, machine=False, code=False)
    for key, value in OUTCOMES[name].items():
        group, _, field = key.partition(".")
        assert getattr(getattr(cfg, group), field) == value, key
    if code == CODE:
        with pytest.raises(ConfigError, match="cannot import 'my_search_agent"):
            load_config(command, files=False)


def test_a_model_file_that_is_not_there_is_what_config_json_says(tmp_path: Path) -> None:
    done = convert_script(FOLDER / "run-agent.sh", tmp_path / "recipe" / "a.yaml")
    assert (
        "models/of-a-model-that-is-not-here.sh" in done.report
        and "as config.json of --hf-checkpoint does" in done.report
    )
    elsewhere = convert_script(FOLDER / "run-sft.sh", tmp_path / "recipe" / "b.yaml").report
    assert f"{FOLDER / 'models' / 'dense-4B.sh'} was read" in elsewhere and "--num-layers 36" in elsewhere


def test_a_refused_flag_may_be_dropped_by_name(tmp_path: Path) -> None:
    drop = ["--rollout-function-path", "--custom-tis-function-path"]
    done = convert_script(FOLDER / "run-fully-async.sh", tmp_path / "recipe" / "a.yaml", drop=drop)
    assert done.code == SAME
    with pytest.raises(ConfigError, match=r"--drop --lr-x: the script does not give it"):
        convert_script(FOLDER / "run-fully-async.sh", tmp_path / "recipe" / "b.yaml", drop=[*drop, "--lr-x"])


def test_dropout_that_slime_would_train_with_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {NEEDED.replace('--hidden-dropout 0.0', '')}")
    out = tmp_path / "recipe" / "a.yaml"
    done = convert_script(script, out)
    assert (done.code, [row.flag for row in done.rows if row.verdict == "refused"]) == (NONE, ["--hidden-dropout"])
    assert convert_script(script, out, drop=["--hidden-dropout"]).code == SAME


def test_a_key_is_not_repeated(tmp_path: Path) -> None:
    assert row(mapped(tmp_path, "--wandb-key s3cret"), "--wandb-key").given == "(not shown)"


def test_the_environment_of_a_job_may_be_part_of_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    env = '{\\"env_vars\\": {\\"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\\": \\"1\\", \\"NVLS\\": \\"$(nvidia-smi)\\"}}'
    script.write_text(f'E="{env}"\nray job submit --runtime-env-json="$E" -- python3 train.py {NEEDED}')
    done = convert_script(script, tmp_path / "recipe" / "a.yaml")
    assert done.code == NONE
    assert "OPEN_TRAINING_INT4_FAKE_QAT_FLAG 1: refused" in done.problem


def test_a_folder_of_scripts_is_counted_by_class(tmp_path: Path) -> None:
    table = check_folder(FOLDER)
    assert "| a recipe of the same job | 3 |" in table
    assert "| a recipe of the same job, once the functions that it names are ported | 1 |" in table
    assert "| no recipe: flags without a counterpart, each named (--drop) | 3 |" in table
    assert "| no recipe: values that the script takes from outside are needed (--set) | 1 |" in table
    assert "refused run-fully-async.sh: --rollout-function-path" in table
    (tmp_path / "launch.py").write_text("import miles.utils.external_utils.command_utils as U\nU.execute_train('')")
    assert "| a Python launcher: one line prints its command line | 1 |" in check_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"builds its command line when it runs.*python -c"):
        convert_script(tmp_path / "launch.py")
    with pytest.raises(ConfigError, match=r"has no script that starts train.py"):
        check_folder(tmp_path / "empty")
