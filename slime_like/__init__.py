"""Reinforcement learning of large language models: Ray, megatron-core and SGLang."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036  an older Python may be the first on PATH
    raise ImportError(
        "slime_like needs Python 3.12, this is " + sys.version.split()[0] + " (" + sys.executable + "): "
        "run `bash scripts/setup.sh`, then `.venv/bin/python` (or activate .venv)"
    )
