"""slime's and Megatron's flags become keys; unknown flags and values are refused by name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from slime_like.config.load.help import render_help
from slime_like.config.load.loader import load_config
from slime_like.config.schema.known import free_root, known_keys
from slime_like.errors import ConfigError
from slime_like_compat.flags.table import ALWAYS, COMBINED, LISTS, REFUSED, SWITCHES, VALUES
from slime_like_compat.flags.translate import flag_of, known_flags, translate
from tests.config.bad_input import refusal

# Flags of slime's scripts/run-qwen3-4B.sh without its paths.
SLIME_SCRIPT = """
--save-interval 20 --input-key prompt --label-key label --apply-chat-template --rollout-shuffle --rm-type math
--num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192
--rollout-temperature 1 --global-batch-size 256 --balance-data
--eval-interval 20 --eval-prompt-data aime a.jsonl math500 b.jsonl@[0:100] --n-samples-per-eval-prompt 16
--eval-max-response-len 16384 --eval-top-p 1
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00
--entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
--attention-dropout 0.0 --hidden-dropout 0.0 --attention-softmax-in-fp32
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate
"""
EXPECTED = {
    "run.save_interval": 20,
    "data.apply_chat_template": True,
    "reward.name": "math",
    "loop.num_rollout": 3000,
    "rollout.max_response_len": 8192,
    "loop.global_batch_size": 256,
    "evaluation.datasets": {"aime": "a.jsonl", "math500": "b.jsonl@[0:100]"},
    "evaluation.n_samples_per_prompt": 16,
    "evaluation.max_response_len": 16384,
    "parallel.tp": 2,
    "parallel.max_tokens_per_rank": 9216,
    "model.recompute": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
    "algo.name": "grpo",
    "algo.kl_loss_coef": 0.0,
    "algo.kl_loss_type": "low_var_kl",
    "algo.eps_clip_high": 0.28,
    "optim.lr": 1e-6,
    "optim.weight_decay": 0.1,
    "rollout.tp": 2,
    "rollout.num_engines": 4,
    "rollout.sglang": {"mem_fraction_static": 0.7},
    "placement.actor_num_gpus_per_node": 8,
    "placement.mode": "colocated",
}
ONE_BY_ONE = {
    "--lr=2e-6": "optim.lr=2e-06",
    "--rollout-top-k -1": "rollout.top_k=-1",
    "--save out/a": "run.dir='out/a'",
    "--load out/a": "run.resume='out/a'",
    "--load out/a --save out/a": "run.resume='auto'",
    "--bf16": "model.dtype='bfloat16'",
    "--attention-backend auto": "model.attention='auto'",
    "--attention-backend flash": "model.attention='torch'",
    "--attention-backend local": "model.attention='torch'",
    "--recompute-modules core_attn mlp": "model.recompute_modules=['core_attn','mlp']",
    "--recompute-granularity full --recompute-method block": "model.recompute_method='block'",
    "--recompute-num-layers 4": "model.recompute_num_layers=4",
    "--eval-prompt-data a.jsonl": "evaluation.datasets.aime='a.jsonl'",
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 16": "loop.steps_per_rollout=2",
    "--num-epoch 3": "loop.num_epoch=3",
    "--rollout-max-prompt-len 2048": "data.max_prompt_len=2048",
    "--rollout-max-prompt-len 1024": "data.on_bad_row=skip",
    "--num-epoch 3 --num-rollout 5": "loop.num_rollout=5",
    "--loss-type sft_loss": "algo=sft",
    "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout": "algo=sft",
    "--loss-type sft_loss --disable-compute-advantages-and-returns": "algo=sft",
    "--loss-mask-type qwen3_5": "data.conversation='whole'",
    "--sglang-dp-size 4 --sglang-enable-dp-attention": "rollout.dp_attention=4",
    "--sglang-data-parallel-size 2 --sglang-enable-dp-attention": "rollout.dp_attention=2",
    "--load out/a/ --save out/a": "run.resume='auto'",
    "--overlap-grad-reduce": "parallel.overlap_grad_reduce=true",
    "--overlap-param-gather": "parallel.overlap_param_gather=true",
    "--ddp-bucket-size 1000": "parallel.bucket_size=1000",
    "--offload-train": "placement.offload_train=true",
    "--colocate --no-offload-rollout": "placement.offload_rollout=false",
    "--optimizer-cpu-offload": "optim.cpu_offload=true",
    "--optimizer-offload-fraction 0.5": "optim.cpu_offload_fraction=0.5",
    "--lr-decay-style WSD": "optim.schedule='wsd'",
    "--lr-wsd-decay-style minus_sqrt": "optim.wsd_decay_style='minus_sqrt'",
    "--lr-wsd-decay-iters 10": "optim.wsd_decay_steps=10",
    "--lr-warmup-fraction 0.1": "optim.warmup_fraction=0.1",
    "--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --lr 1": "optim.lr=1.0",
    "--rollout-stop-token-ids 1 2 run.name=x": "rollout.stop_token_ids=[1,2]",
    "--custom-rm-path pkg.mod.fn": "reward.name='pkg.mod:fn'",
    "--rm-type boxed_gpqa": "reward.name='boxed_gpqa'",
    "--rm-url http://h:1/s": "reward.remote_url='http://h:1/s'",
    "--reward-key score --eval-reward-key acc --log-passrate --lr 1": "optim.lr=1.0",
    "--use-fault-tolerance": "health.on_dead_engine='restart'",
    "--rollout-health-check-interval 10": "health.interval_s=10.0",
    "--rollout-health-check-timeout 5": "health.timeout_s=5.0",
    "--rollout-health-check-first-wait 0": "health.first_wait_s=0.0",
    "--custom-generate-function-path pkg.mod:fn": "rollout.generate='pkg.mod:fn'",
    "--data-source-path pkg.mod.Source": "data.source='pkg.mod:Source'",
    "--dynamic-sampling-filter-path pkg.mod.fn": "rollout.filters=['pkg.mod:fn']",
    "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": (
        "rollout.filters=['nonzero_std']"
    ),
    "--dynamic-sampling-filter-path a.b": "rollout.max_refills=100",
    "--over-sampling-batch-size 64": "rollout.over_sampling_batch_size=64",
    "--over-sampling-batch-size 64 --partial-rollout": "rollout.partial_rollout=true",
    "--mask-offpolicy-in-partial-rollout": "algo.mask_offpolicy=true",
    "--update-weight-buffer-size 536870912": "weights.bucket_mb=512.0",
    "--skip-eval-before-train": "evaluation.before_train=false",
    "--advantage-estimator reinforce_plus_plus": "algo=reinforce_pp",
    "--advantage-estimator gspo": "algo=gspo",
    "--advantage-estimator cispo": "algo=cispo",
    "--advantage-estimator rloo": "algo=rloo",
    "--advantage-estimator reinforce_plus_plus_baseline": "algo=reinforce_pp_baseline",
    "--eps-clip-high 0.28": "algo.eps_clip_high=0.28",
    "--eps-clip-c 3": "algo.eps_clip_c=3.0",
    "--use-tis": "algo.use_tis=true",
    "--tis-clip 5": "algo.tis_clip=5.0",
    "--tis-clip-low 0.2": "algo.tis_clip_low=0.2",
    "--use-rollout-logprobs": "algo.use_rollout_logprobs=true",
    "--use-routing-replay": "algo.routing_replay=old",
    "--use-rollout-routing-replay --use-routing-replay": "algo.routing_replay=rollout",
    "--kl-coef 0.1": "algo.kl_coef=0.1",
    "--use-kl-loss --kl-loss-coef 0.01": "algo.kl_loss_coef=0.01",
    "--debug-rollout-only": "run.mode='rollout_only'",
    "--save-debug-rollout-data": "run.dump_rollouts=true",
    "--load-debug-rollout-data out/rollouts": "run.mode=train_only",
    "--rollout-num-gpus 4": "placement.mode='split'",
    "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2": "rollout.num_engines=2",
    '--apply-chat-template-kwargs {"enable_thinking":false}': "data.chat_template_kwargs.enable_thinking=false",
    "--sglang-disable-radix-cache": "rollout.sglang.disable_radix_cache=true",
    "--sglang-disable-radix-cache false": "rollout.sglang.disable_radix_cache=false",
    "--sglang-decode-context-parallel-size 2": "rollout.dcp=2",
    "--sglang-dcp-size 2": "rollout.dcp=2",
    "--sglang-dcp-size 2 --sglang-dcp-comm-backend a2a": "rollout.dcp_comm='a2a'",
    "--sglang-linear-attn-backend cutedsl": "rollout.sglang.linear_attn_backend='cutedsl'",
    "--sglang-linear-attn-decode-backend flashinfer": "rollout.sglang.linear_attn_decode_backend='flashinfer'",
    "--sglang-attention-backend fa3": "rollout.sglang.attention_backend='fa3'",
    "--moe-aux-loss-coeff 0.01": "model.megatron.moe_aux_loss_coeff=0.01",
}
REFUSALS = {
    "--rollout-batch-sze 3": ["--rollout-batch-sze", "'--rollout-batch-size'"],
    "--zzz": ["--zzz", "--help"],
    "--lr": ["--lr needs a value"],
    "--lr --colocate": ["--lr needs a value"],
    "--lr fast": ["--lr fast", "a number"],
    "--num-rollout 1.5": ["--num-rollout 1.5", "a whole number"],
    "--colocate=1": ["--colocate takes no value", "'1'"],
    "--lr-decay-style wsd": ["--lr-decay-style wsd", "constant, linear, cosine"],
    "--attention-backend fused": ["--attention-backend fused", "auto, flash or local", "model.attention=te"],
    "--attention-backend unfused": ["--attention-backend unfused", "model.attention=te"],
    "--optimizer sgd": ["--optimizer sgd", "adam"],
    "--advantage-estimator a2c": ["a2c", "not supported yet", "grpo"],
    "--update-weight-mode delta": ["--update-weight-mode delta", "not supported yet"],
    "--update-weight-transport disk": ["--update-weight-transport disk"],
    "--save-debug-rollout-data x/{rollout_id}.pt": ["run.dir/rollouts"],
    "--kl-loss-coef 0.1": ["--kl-loss-coef 0.1", "--use-kl-loss"],
    "--custom-rm-path fn": ["--custom-rm-path fn", "dotted path"],
    "--eval-prompt-data a b c": ["--eval-prompt-data a b c", "pairs"],
    "--sglang-dp-size 4": ["--sglang-dp-size 4", "--sglang-enable-dp-attention"],
    "--loss-type custom_loss": ["--loss-type custom_loss", "--custom-loss-function-path"],
    "--loss-type other_loss": ["--loss-type other_loss", "sft_loss"],
    "--custom-loss-function-path a.b": ["--custom-loss-function-path a.b", "--loss-type custom_loss"],
    "--custom-tis-function-path a.b": ["--custom-tis-function-path a.b", "--use-tis"],
    "--loss-mask-type qwen3": ["--loss-mask-type qwen3", "qwen3_5"],
    "--rollout-function-path a.b": ["--rollout-function-path a.b", "--custom-generate-function-path"],
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout": ["--loss-type policy_loss"],
    "--disable-compute-advantages-and-returns": ["--loss-type sft_loss"],
    "--num-epoch x": ["--num-epoch x", "a whole number"],
    "--rollout-max-prompt-len x": ["--rollout-max-prompt-len x", "a whole number"],
    "--eval-config nowhere.yaml": ["--eval-config: nowhere.yaml is missing"],
    "--eval-prompt-data a/b x.jsonl": ["a/b", "letters"],
    "--eval-prompt-data a x.jsonl b y.jsonl a z.jsonl": ["a z.jsonl", "another dataset has the name a", "rename"],
    "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2": ["--rollout-num-gpus 3", "multiple of 2"],
    "--apply-chat-template-kwargs x": ["--apply-chat-template-kwargs x", "JSON"],
    "--sglang-mem-fracton-static 1": ["--sglang-mem-fracton-static", "'--sglang-mem-fraction-static'"],
    "--sglang-tp-size 2": ["--sglang-tp-size", "rollout.tp"],
    "--sglang-enable-mixed-chunk maybe": ["--sglang-enable-mixed-chunk maybe", "true, false"],
    "--num-layers 4": ["--num-layers", "config.json"],
    "--cfg all": ["--cfg all", "job"],
}


def test_the_flags_of_a_slime_script_load(argv: list[str]) -> None:
    cfg = load_config([*argv, *shlex.split(SLIME_SCRIPT)], files=False)
    for key, value in EXPECTED.items():
        group, _, name = key.partition(".")
        assert getattr(getattr(cfg, group), name) == value, key


@pytest.mark.parametrize(("line", "override"), ONE_BY_ONE.items(), ids=list(ONE_BY_ONE))
def test_a_flag_sets_its_key(line: str, override: str) -> None:
    assert override in translate(line.split(" ")).overrides


@pytest.mark.parametrize(("line", "words"), REFUSALS.items(), ids=list(REFUSALS))
def test_unknown_flags_and_values_are_refused(line: str, words: list[str]) -> None:
    with refusal(words):
        translate(line.split(" "))


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_of_missing_features_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} is not supported yet"):
        translate([flag, "1"])


def test_flags_map_to_existing_keys() -> None:
    targets = [key for key, _ in (VALUES | LISTS | SWITCHES).values()]
    targets += [key for keys in COMBINED.values() for key in keys if key != "algo"]
    assert [key for key in targets if key not in known_keys() and free_root(key) is None] == []
    assert len(known_flags()) >= 60
    assert not set(REFUSED) & set(known_flags())


def test_flags_of_fixed_behaviour_set_no_key() -> None:
    for flag, (required_value, _) in ALWAYS.items():
        assert translate([flag] if required_value is None else [flag, required_value]).overrides == ()


def test_an_explicit_key_wins_over_combined_flags(argv: list[str]) -> None:
    cfg = load_config([*argv, "rollout.num_engines=3", "--rollout-num-gpus", "4"], files=False)
    assert (cfg.rollout.num_engines, cfg.placement.mode) == (3, "split")


def test_the_last_of_repeated_flags_wins(argv: list[str]) -> None:
    line = ["--lr", "1", "--lr", "2", "--rollout-num-gpus-per-engine", "1", "--rollout-num-gpus-per-engine", "2"]
    cfg = load_config([*argv, *line, "--rollout-num-gpus", "4"], files=False)
    assert (cfg.optim.lr, cfg.rollout.num_engines, cfg.rollout.tp) == (2.0, 2, 2)


@pytest.mark.parametrize("removal", ["~algo.kl_loss_coef", "~evaluation.datasets", "~evaluation"])
def test_a_removal_is_no_value_of_the_flag_before_it(removal: str) -> None:
    assert translate(["--sglang-enable-p2p-check", removal]).overrides[-1] == removal
    assert translate(["--rollout-stop-token-ids", "1", removal]).overrides[-1] == removal


def test_a_path_in_a_home_folder_is_a_value() -> None:
    assert translate(["--hf-checkpoint", "~model/x"]).overrides == ("model.hf_checkpoint='~model/x'",)


def test_a_checkpoint_in_a_home_folder_is_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "metadata.json").touch()
    assert translate(["--load", "~/m"]).overrides == ("model.megatron_checkpoint='~/m'",)
    assert translate(["--load", "~no-user/m"]).overrides == ("run.resume='~no-user/m'",), "load_config names the user"


def test_actions() -> None:
    assert translate(["--plan", "a=b"]).action == "plan"
    assert translate(["--doctor"]).action == "doctor"
    assert translate(["--cfg", "job"]).action == "show"
    assert (translate(["--help", "rollout"]).action, translate(["--help", "rollout"]).topic) == ("help", "rollout")
    assert translate(["-h"]).action == "help"
    assert translate([]).action == "train"


def test_help_names_every_key_flag_and_recipe() -> None:
    text = render_help()
    assert [name for name in [*known_keys(), *known_flags(), "+recipe=quickstart"] if name not in text] == []
    assert "placement.mode" in render_help("placement")
    assert "rollout.tp" not in render_help("placement")
    recipes = " ".join(text.partition("Recipes")[2].partition("model.*")[0].split()).split("+recipe=")[1:]
    assert len(recipes) > 10 and [recipe for recipe in recipes if not recipe.rstrip().endswith(".")] == []
    with pytest.raises(ConfigError, match=r"--help rolout.*'rollout'"):
        render_help("rolout")


def test_help_shows_the_algo_keys_of_the_default_algorithm() -> None:
    lines = " ".join(render_help("algo").split())
    assert "algo.name Algorithm. (str; grpo)" in lines
    assert "policy_gradient) [gspo: gspo, cispo: cispo, sft: sft]" in lines
    assert "(float | None; null) [all but cispo, sft]" in lines


def test_flag_of_a_key() -> None:
    assert flag_of("model.hf_checkpoint") == "--hf-checkpoint"
    assert flag_of("evaluation.datasets") == "--eval-prompt-data"
    assert flag_of("run.prepare") is None
