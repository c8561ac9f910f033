"""slime flags: mapped, dropped or refused in combination with other flags, without a traceback for any value."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest

from slime_like.config.schema.known import known_keys
from slime_like.errors import ConfigError
from slime_like_compat.flags.defaults import DEFAULTS
from slime_like_compat.flags.table import ALWAYS, COMBINED, LISTS, REFUSED, SWITCHES, VALUES
from slime_like_compat.flags.translate import translate
from slime_like_compat.shell.launch_script import read_launch
from slime_like_compat.shell.values import Value
from slime_like_compat.slime.occurrences import Flags, group_by_flag
from slime_like_compat.slime.rows import row_of
from slime_like_compat.slime.special import CODE, VERDICT_FUNCTIONS
from tests.config.bad_input import refusal
from tests.convert.slime_lines import NEEDED, composed, mapped, row

OWN_ALGORITHM = "tests.config.own_algorithm"
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
    "--sglang-schedule-policy $X": ("--sglang-schedule-policy", "needed", "--set X=VALUE"),
    "--sglang-disable-radix-cache $X": ("--sglang-disable-radix-cache", "needed", "--set X=VALUE"),
    "--moe-grouped-gemm $X": ("--moe-grouped-gemm", "needed", "--drop=--moe-grouped-gemm"),
    "--sglang-tp-size $X": ("--sglang-tp-size", "refused", "rollout.tp"),
    "--sglang-tp-size 2": ("--sglang-tp-size", "refused", "rollout.tp"),
    "--colocate --sglang-mem-fraction-static 0.8": ("--sglang-mem-fraction-static", "mapped", "--plan"),
    "--update-weight-mode delta": ("--update-weight-mode", "dropped", "sends all weights"),
    "--optimizer adam": ("--optimizer", "always", "AdamW"),
    "--optimizer muon": ("--optimizer", "refused", "AdamW"),
    "--update-weights-interval 2": ("--update-weights-interval", "refused", "every rollout"),
    "--custom-generate-function-path nowhere.fn": ("--custom-generate-function-path", "code", "PYTHONPATH"),
    "--custom-generate-function-path fn": ("--custom-generate-function-path", "refused", "dotted path"),
    "--dynamic-sampling-filter-path nowhere.fn": ("--dynamic-sampling-filter-path", "code", "PYTHONPATH"),
    "--custom-loss-function-path a.b": ("--custom-loss-function-path", "dropped", "--loss-type custom_loss"),
    "--loss-type custom_loss --custom-loss-function-path a.b": ("--custom-loss-function-path", "code", "extending.md"),
    "--custom-loss-function-path a.b --loss-type custom_loss": ("--loss-type", "mapped", "names the loss"),
    f"--loss-type custom_loss --custom-loss-function-path {OWN_ALGORITHM}.slime_loss": (
        "--custom-loss-function-path",
        "code",
        "cannot be called as loss(config): missing a required argument: 'batch'",
    ),
    f"--loss-type custom_loss --custom-loss-function-path {OWN_ALGORITHM}.Reinforce": (
        "--custom-loss-function-path",
        "mapped",
        "",
    ),
    "--loss-type custom_loss": ("--loss-type", "refused", "with --custom-loss-function-path"),
    "--use-tis --custom-tis-function-path a.b": ("--custom-tis-function-path", "code", "docs/extending.md"),
    "--custom-tis-function-path a.b": ("--custom-tis-function-path", "dropped", "--use-tis"),
    "--custom-advantage-function-path a.b": ("--custom-advantage-function-path", "code", "docs/extending.md"),
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
    "--ref-load /a/m-sft_torch_dist": (
        "--ref-load",
        "mapped",
        "a model of another name than --hf-checkpoint: the policy starts from it",
    ),
    "--num-layers 4": ("--num-layers", "refused", "gated"),
    "--num-layers 4 --swiglu": ("--num-layers", "dropped", "config.json"),
    "--position-embedding-type none": ("--position-embedding-type", "refused", "rotary"),
    "--post-self-attn-layernorm": ("--post-self-attn-layernorm", "dropped", "config.json"),
    "--opd-teacher-load /m/T_torch_dist": ("--opd-teacher-load", "refused", "HF folder"),
    "--ref-load $X": ("--ref-load", "needed", "--set X=VALUE"),
    "--save c --ref-load $X --load $Y": ("--load", "needed", "--set Y=VALUE"),
    "--save c --ref-load m_torch_dist --load m_torch_dist": ("--load", "dropped", "--ref-load"),
    "--num-epoch 2": ("--num-epoch", "dropped", "--num-rollout"),
    '--train-env-vars \'{"NCCL_DEBUG":"INFO"}\'': ("--train-env-vars", "dropped", "in the environment of train.py"),
    '--train-env-vars \'{"FAKE_QUANT":"1"}\'': ("--train-env-vars", "refused", "unknown"),
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
    "--multi-latent-attention": ("--multi-latent-attention", "dropped", "config.json"),
    "--spec slime_plugins.models.glm4 get_glm_spec": ("--spec", "dropped", "config.json"),
    "--spec slime_plugins.models.minimax_m2 get_minimax_m2_spec": ("--spec", "dropped", "config.json"),
    "--spec slime_plugins.models.gemma4 get_gemma4_spec": ("--spec", "refused", "no supported model family"),
    "--spec slime_plugins.models.glm5.glm5 get_glm5_spec": ("--spec", "refused", "its attention is sparse (DSA"),
    "--experimental-attention-variant dsa": (
        "--experimental-attention-variant",
        "refused",
        "its attention is sparse (DSA",
    ),
    "--hf-checkpoint /m/DeepSeek-V3.2-Exp": ("--hf-checkpoint", "refused", "its attention is sparse (DSA"),
    "--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec": ("--spec", "dropped", "config.json"),
    "--moe-router-score-function sigmoid": ("--moe-router-score-function", "dropped", "config.json"),
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
def test_the_verdict_of_a_flag(line: str, expected: tuple[str, str, str], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {NEEDED} \\\n {line}")
    flags = Flags.of(group_by_flag(read_launch(script, variables={}).arguments))
    flag, verdict, words = expected
    flag_row = row_of(flags.by_name[flag], flags) if flag in flags else row(mapped(tmp_path, line), flag)
    assert (flag_row.verdict, words in flag_row.note) == (verdict, True), flag_row


def test_the_last_of_repeated_flags_counts(tmp_path: Path) -> None:
    job = mapped(tmp_path, "--lr 1e-5 --lr 2e-5")
    assert [row.note.split(" at ")[0] for row in job.rows if row.flag == "--lr"] == ["given again", ""]
    assert job.config is not None and job.config.optim.lr == 2e-5


def test_defaults_of_slime_are_kept(tmp_path: Path) -> None:
    cfg = composed(tmp_path, "--rollout-temperature 0.7 --eval-interval 1 --eval-prompt-data a b.jsonl")
    assert (cfg.data.input_key, cfg.data.shuffle, cfg.run.seed) == ("input", False, 1234)
    assert (cfg.optim.schedule, cfg.optim.weight_decay, cfg.optim.beta2) == ("linear", 0.01, 0.999)
    assert (cfg.evaluation.temperature, cfg.algo.aggregation) == (0.7, "sequence_mean")
    gspo = composed(tmp_path, "--advantage-estimator gspo --eps-clip 3e-4")
    assert (getattr(gspo.algo, "eps_clip_high", 0), gspo.algo.aggregation) == (None, "sequence_mean")
    kinds = [composed(tmp_path, f"--use-kl-loss {coef}").algo for coef in ("", "--kl-loss-coef 0.1")]
    assert [getattr(algo, "kl_loss_type", "") for algo in kinds] == ["low_var_kl", "k1"], (
        "slime's default, if a KL term is used"
    )
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
def test_an_invalid_value_names_its_line(line: str, words: list[str], tmp_path: Path) -> None:
    with refusal(words):
        mapped(tmp_path, line)
    flag = line.split(" ")[0]
    assert "by --drop" in [row.note for row in mapped(tmp_path, line, drop=[flag]).rows if row.flag == flag]


ODD = ("0", "null", "text", "[]", "{}", "", "nan", "-1", "[" * 2000, "1" * 400)


def test_no_value_of_a_flag_ends_in_a_traceback(tmp_path: Path) -> None:
    base = [Value(text, "run.sh:1") for text in f"{NEEDED} --colocate --actor-num-gpus-per-node 8".split()]
    flags = dict.fromkeys([*VALUES, *LISTS, *SWITCHES, *COMBINED, *ALWAYS, *REFUSED, *VERDICT_FUNCTIONS, *CODE])
    flags |= dict.fromkeys(
        ("--sglang-mem-fraction-static", "--sglang-json-model-override-args", "--moe-aux-loss-coeff")
    )
    assert len(flags) > 300
    for flag, text in itertools.product(flags, ODD):
        groups = group_by_flag([*base, Value(flag, "run.sh:2"), Value(text, "run.sh:2")])
        with contextlib.suppress(ConfigError):
            flag_row = row_of(groups[-1], Flags.of(groups))
            if flag_row.verdict in ("mapped", "code"):
                translate([text for item in groups for text in item.argv])


@pytest.mark.parametrize("text", ["[1]", "3", "null"])
def test_variables_that_are_not_a_mapping_are_refused(text: str, tmp_path: Path) -> None:
    assert row(mapped(tmp_path, f"--train-env-vars {text}"), "--train-env-vars").verdict == "refused"


@pytest.mark.parametrize("config", ["3", "[1]", "{"])
def test_a_damaged_model_config_is_left_for_load_to_report(config: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    assert row(mapped(tmp_path, f"--hf-checkpoint {tmp_path}/model"), "--hf-checkpoint").verdict == "mapped"


def test_quantised_weights_in_a_home_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"quantization_config": {}}')
    assert row(mapped(tmp_path, "--hf-checkpoint ~/model"), "--hf-checkpoint").verdict == "refused"


def test_a_secret_key_is_not_shown(tmp_path: Path) -> None:
    assert row(mapped(tmp_path, "--wandb-key s3cret"), "--wandb-key").value_text == "(not shown)"
