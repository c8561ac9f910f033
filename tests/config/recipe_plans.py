"""Plans of recipes on described machines."""

from __future__ import annotations

from slime_like.cluster.plan.machine import Machine, described_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.remedies import OFFLOAD_KEYS
from slime_like.config.load.loader import load_config

H100 = described_machine("8xH100")
WIDE = ("model.hf_checkpoint=models/Qwen3-30B-A3B", "rollout.tp=8", "rollout.num_engines=1", "parallel.ep=8")
OFFLOAD = tuple(OFFLOAD_KEYS.split())
RESIDENT = (*(f"{key.partition('=')[0]}=false" for key in OFFLOAD), "rollout.sglang.mem_fraction_static=0.5")


def plan(recipe: str, *overrides: str, machine: Machine = H100, shipped: bool = False) -> Plan:
    """Plan a recipe. Unless ``shipped``, qwen3_4b_gsm8k has no offload, so that trainer and engine stay on a GPU."""
    changed = {override.partition("=")[0] for override in overrides}
    resident = () if shipped or recipe != "qwen3_4b_gsm8k" else RESIDENT
    base = [override for override in resident if override.partition("=")[0] not in changed]
    return make_plan(load_config([f"+recipe={recipe}", *base, *overrides], files=False, machine=False), machine)
