"""Parts of trainer ranks and engines that are on their shared GPUs in each phase of the loop.

This module does not import torch.

| phase   | trainer                        | engine                              |
|---------|--------------------------------|-------------------------------------|
| collect | nothing                        | weights, KV cache, CUDA graphs      |
| step    | weights, gradients, optimizer  | nothing                             |
| push    | weights                        | weights, then everything (probe)    |
| save    | weights, optimizer             | weights                             |

``placement.offload_train`` applies the second column, ``placement.offload_rollout`` the third. A critic or teacher has
nothing on its device in phase push.
"""

from __future__ import annotations

from collections.abc import Mapping

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
TRAINER_PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER)
COLLECT, STEP, PUSH, SAVE = "collect", "step", "push", "save"

TRAINER_PHASES: Mapping[str, tuple[str, ...]] = {
    COLLECT: (),
    STEP: TRAINER_PARTS,
    PUSH: (WEIGHTS,),
    SAVE: (WEIGHTS, OPTIMIZER),
}
"""Phase -> parts of a trainer rank on its device."""

ENGINE_WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"  # tags of SGLang's memory saver
ENGINE_PARTS = (ENGINE_WEIGHTS, KV_CACHE, CUDA_GRAPH)

ENGINE_PHASES: Mapping[str, tuple[str, ...]] = {
    COLLECT: ENGINE_PARTS,
    STEP: (),
    PUSH: (ENGINE_WEIGHTS,),  # before the weights arrive; the commit adds the others
    SAVE: (ENGINE_WEIGHTS,),
}
"""Phase -> parts of an engine on its devices."""
