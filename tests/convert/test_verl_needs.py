"""verl keys that need another key: refused without it, as verl fails too."""

from __future__ import annotations

import pytest

from tests.config.bad_input import refusal
from tests.convert.verl_lines import FILTER, METRIC, OVERLONG, A, C, R, mapped

WSD = f"{A}.optim.lr_decay_style=wsd"
ASYNC = f"trainer.v1.trainer_mode=separate_async {R}.nnodes=1"
NEEDS = {
    FILTER: ["run.sh:1", f"{FILTER} needs {METRIC}, which is not given", f"{METRIC}=acc"],
    f"{FILTER} {METRIC}=null": [f"{FILTER} needs {METRIC}, which is null", f"{METRIC}=acc"],
    f"{C}.rollout_rs=seq_sum_k1": [f"{C}.rollout_rs=seq_sum_k1 needs {C}.rollout_rs_threshold, which is not given"],
    f"{C}.rollout_rs=seq_sum_k1 {C}.rollout_rs_threshold=null": [f"{C}.rollout_rs_threshold, which is null"],
    f"{C}.bypass_mode=True {R}.calculate_log_probs=False": [f"{C}.bypass_mode=True needs {R}.calculate_log_probs=True"],
    **{
        " ".join(text for text in OVERLONG.split() if f".{name}=" not in text): [
            "enable=True needs",
            f".{name}, which is",
        ]
        for name in ("len", "penalty_factor", "max_resp_len")
    },
    WSD: [f"{WSD} needs {A}.optim.lr_wsd_decay_steps, which is not given"],
    f"algorithm.adv_estimator=gae {WSD} {A}.optim.lr_wsd_decay_steps=2 critic.optim.lr_decay_style=wsd": [
        "critic.optim.lr_decay_style=wsd needs critic.optim.lr_wsd_decay_steps"
    ],
    f"{ASYNC} trainer.v1.separate_async.parameter_sync_step=2": [
        "parameter_sync_step=2",
        "ppo_mini_batch_size",
        "to 4",
    ],
    f"{ASYNC} {A}.ppo_mini_batch_size=32": ["parameter_sync_step=4 (verl's default)", "set it to 2"],
}


@pytest.mark.parametrize(("line", "words"), NEEDS.items(), ids=list(NEEDS))
def test_the_message_names_both_keys(line: str, words: list[str]) -> None:
    with refusal(words):
        mapped(line)
