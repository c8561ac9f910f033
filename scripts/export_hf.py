"""Write a checkpoint of a run as a model in HF format. Neither Ray nor engines are started; the run may still be training.

python scripts/export_hf.py runs/my_run --output models/mine                    # the newest checkpoint
python scripts/export_hf.py runs/my_run/checkpoints/iter_0000040 --output models/mine --dtype bfloat16
python scripts/export_hf.py /models/Qwen3-4B_torch_dist --hf-checkpoint /models/Qwen3-4B --output models/mine
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_like.checkpoint.files import megatron_folder
from slime_like.errors import CheckpointError, SlimeLikeError
from slime_like.printable import complaint, visible
from slime_like.util.leave import leave
from slime_like.util.reading import YAML_ERRORS


def main(argv: list[str]) -> int:
    """Return the exit code: 0, or 1 after printing an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run's folder, its checkpoints folder, or one iteration of it")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; replaced if it is an export")
    parser.add_argument("--hf-checkpoint", help="config and tokenizer; default: that of the run's config.yaml")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--max-shard-gb", type=float, default=4.0, help="size of one safetensors file")
    args = parser.parse_args(argv)
    if not 0 < args.max_shard_gb < math.inf:
        parser.error(f"--max-shard-gb {args.max_shard_gb}: a size is above 0")
    try:
        source = find(args.checkpoint)
        hf = args.hf_checkpoint or model_of(source)
        from slime_like.train.megatron.model_io.convert import export_checkpoint

        export_checkpoint(source, hf, args.output, dtype=args.dtype, max_bytes=int(args.max_shard_gb * 2**30))
    except SlimeLikeError as error:
        sys.stderr.write(complaint(error))
        return 1
    sys.stdout.write(visible(f"{source} -> {args.output}\n"))
    return 0


def find(path: Path) -> Path:
    """Return the folder of a checkpoint: ``path``, or the one that the tracker file in ``path`` or ``path``/checkpoints names.

    Raises ``CheckpointError`` if none is found, or if the tracker file is unreadable or invalid.
    """
    for folder in (path / "checkpoints", path):
        if (source := megatron_folder(folder)) is not None:
            return source
    raise CheckpointError(
        f"{path}: no checkpoint found (give a run's folder, its checkpoints folder, or an iter_* folder)"
    )


def model_of(source: Path) -> str:
    """Return ``model.hf_checkpoint`` from the config.yaml of the run that wrote ``source``; nothing else in it is checked.

    Raises ``CheckpointError`` if that file is missing or unreadable, or names no model.
    """
    path = source.absolute().parents[1] / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, so the model is unknown: give its folder with --hf-checkpoint")
    try:
        hf = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["hf_checkpoint"]
        if not hf or not isinstance(hf, str):
            raise ValueError(f"hf_checkpoint is {hf!r}")
        return hf
    except (OSError, *YAML_ERRORS) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"{path}: names no model ({reason}): give its folder with --hf-checkpoint") from error


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
