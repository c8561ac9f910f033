"""Names of the plugins that ``SLIME_LIKE_SGLANG`` enables, and the variable that selects the kernels on a CPU."""

CPU = "cpu"
EXACT = "exact"  # together with CPU: batch-invariant results
CPU_KERNELS_VARIABLE = "SLIME_LIKE_CPU_KERNELS"  # rollout.cpu_kernels
DCP = "dcp"
DEQUANTISE = "dequantise"
FLOW_MLA = "flow_mla"
KV_ADMISSION, KV_SIZE, KV_USAGE = "kv_admission", "kv_size", "kv_usage"
REMOTE_EXPERTS = "remote_experts"
ROLLOUT_SAMPLING = "rollout_sampling"
WEIGHT_COMMIT = "weight_commit"
