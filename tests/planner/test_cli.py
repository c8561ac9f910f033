"""``python -m slime_like.planner``."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slime_like.planner.__main__ import main
from slime_like.planner.models import MODELS
from slime_like.planner.plot import COLUMNS


def test_answers_batch_limit_and_changes_without_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["DeepSeek-R1", "--on", "8xH20", "--weights", "fp8", "--static", "most"]) == 0
    text = capsys.readouterr().out
    assert "batch      52 requests of 1024 + 2048 tokens, limited by the KV cache" in text
    assert "--dp-attention 8 --flow-mla output" in text and "does not fit" in text


def test_shows_the_trainer_and_writes_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plan.svg"
    layout = ["--tp", "2", "--train", "--train-tp", "2", "--tokens", "16384", "--recompute", "full", "--offload", "0.5"]
    assert main(["Qwen3-4B", "--on", "8xH100", *layout, "--svg", str(plot)]) == 0
    text = capsys.readouterr().out
    assert (
        "trainer rank (tp 2, pp 1, cp 1, dp 4, ep 1, etp 1; 16384 tokens, recompute full)" in text
        and "50% on the host" in text
    )
    assert "they take turns" in text and "space for KV" in text
    labels = [element.text for element in ElementTree.parse(plot).iter() if element.tag.endswith("text")]
    assert {"engine", "trainer", "KV cache", "gradients"} <= set(labels)


def test_reads_a_folder_with_config_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-0.6B"]))
    assert main([str(tmp_path), "--on", "1xRTX4090"]) == 0
    assert "0.60B parameters" in capsys.readouterr().out


def test_a_folder_name_that_is_not_utf8_is_plotted(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"model-\xff")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Qwen3-0.6B"]))
    plot = tmp_path / "plan.svg"
    assert main([str(folder), "--on", "1xH20", "--svg", str(plot)]) == 0
    assert ElementTree.parse(plot).getroot() is not None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["Qwen3-4C", "--on", "8xH20"], "MODEL='Qwen3-4C' is neither a folder with a config.json nor a model"),
        (
            ["GLM-4.7-Flash", "--on", "8xH20"],
            "'glm4_moe_lite', which is not supported: latent attention with GLM's tensor names",
        ),
        (["DeepSeek-V3.2", "--on", "8xH20"], "'deepseek_v32', which is not supported: its attention is sparse (DSA"),
        (["Qwen3-4B", "--on", "8xRTX4091"], "--on 8xRTX4091: GPU 'RTX4091' is unknown: did you mean 'RTX4090'?"),
        (["Qwen3-4B", "--on", "eight"], "--on eight: write [NODESx]GPUSxNAME"),
        (["Qwen3-4B", "--on", "8xH20", "--tp", "16"], "--tp 16 is above the 8 GPUs of --on 8xH20"),
        (["Qwen3-4B", "--on", "8xH20", "--static", "1.5"], "--static 1.5: give a fraction between 0 and 1"),
        (
            ["Qwen3-4B", "--on", "8xH100", "--static", "1e-9"],
            "--static 1e-09 gives the engine 0 MiB of a GPU, less than its 0.94 GiB of weights: set --static above 0.012",
        ),
        (
            ["Qwen3-4B", "--on", "8xH100", "--static", "0.99"],
            "needs 81.4 GiB of each GPU's 79.6 GiB: set --static 0.96",
        ),
        (
            ["Qwen3-235B-A22B", "--on", "8xH20", "--dcp", "4"],
            "the 8 attention ranks store each of the 4 KV heads of Qwen3-235B-A22B 2 times, and a larger --dcp adds no capacity: "
            "set --dcp 2",
        ),
        (["Qwen3-4B", "--on", "8xH20", "--train", "--train-tp", "16", "--tp", "8"], "does not divide the 8 GPUs"),
        (
            ["Qwen3-30B-A3B", "--on", "8xH20", "--train", "--train-tp", "8"],
            "does not divide the 32 attention heads and 4 KV heads",
        ),
        (["Qwen3-4B", "--on", "64xH20", "--tp", "8", "--train", "--train-pp", "64"], "is above the 36 layers"),
        (
            ["Qwen3-4B", "--on", "8xH20", "--train", "--offload", "1", "--distributed-optimizer", "false"],
            "--offload 1 needs --distributed-optimizer true: set --distributed-optimizer true, or remove --offload",
        ),
        (
            ["Qwen3-4B", "--on", "8xH20", "--input", "40000"],
            "--input 40000 + --output 2048 is above the 40960 positions",
        ),
        (["Qwen3-4B", "--on", "8xH20", "--train", "--train-tp", "3"], "does not divide the 8 GPUs"),
        (
            ["Qwen3-30B-A3B", "--on", "8xH20", "--train", "--train-ep", "3"],
            "--train-ep 3 must divide the 128 experts",
        ),
        (["Qwen3-4B", "--on", "8xH20", "--train", "--train-ep", "8"], "--train-ep 8: Qwen3-4B has no experts: set"),
        (["Qwen3-4B", "--on", "8xH20", "--svg", "/nonexistent/x.svg"], "--svg /nonexistent/x.svg: No such file"),
    ],
)
def test_bad_input_is_one_message_with_flag_and_value(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_every_change_of_the_trainer_is_computed_as_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["Qwen3-30B-A3B", "--on", "8xH200", "--tp", "2", "--train", "--train-tp", "2"]
    rows = _changes(base, capsys)
    assert {"--recompute", "--offload", "--distributed-optimizer", "--logits-chunk", "--train-tp", "--train-cp"} <= {
        flags.split()[0] for flags in rows
    }
    for flags, total in rows.items():
        assert main([*base, *flags.split()]) == 0
        assert f"  total          {total}" in re.sub(r"total +", "total          ", capsys.readouterr().out), flags


def _changes(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the memory of a trainer rank after each change in the table."""
    assert main(argv) == 0
    table = capsys.readouterr().out.split("single changes, on the same number of GPUs\n")[1].split("\n\n")[0]
    rows = (re.fullmatch(r"  (--.*?)  +([\d.]+ GiB) .*", line) for line in table.splitlines())
    return {row[1]: row[2] for row in rows if row is not None}


def test_the_bars_of_the_text_plot_are_as_long_as_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["Qwen3-4B", "--on", "8xH100", "--train", "--recompute", "full"]) == 0
    lines = capsys.readouterr().out.splitlines()
    bar = next(line for line in lines if line.startswith("  engine  ") and "|" in line)
    marks, size = bar.split("|")[0].split()[1], float(bar.split("|")[1].split()[0])
    assert len(marks) == pytest.approx(COLUMNS * size / 79.6, abs=1)
    assert all(re.search(rf"\b{mark} [A-Za-z]", "\n".join(lines[-3:])) for mark in set(marks))


def test_flags_of_the_trainer_need_train(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["Qwen3-4B", "--on", "8xH100", "--recompute", "full"])
    assert "--recompute has no effect without --train" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["Qwen3-4B", "--on", "8xH100"], ["--help"]])
@pytest.mark.parametrize(
    ("redirect", "code", "message"),
    [
        (">/dev/full", 1, "standard output cannot be written: No space left on device\n"),
        (">&-", 1, "standard output cannot be written: it is closed\n"),
        ("| true; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_output_that_cannot_be_written_prints_no_traceback(
    redirect: str, code: int, message: str, arguments: list[str]
) -> None:
    command = shlex.join([sys.executable, "-m", "slime_like.planner", *arguments])
    process = subprocess.run(["bash", "-c", f"{command} {redirect}"], capture_output=True, text=True, check=False)
    if arguments == ["--help"]:  # argparse itself ignores that it cannot write
        assert "Traceback" not in process.stderr and "Exception ignored" not in process.stderr
    else:
        assert (process.returncode, process.stderr) == (code, message)


@pytest.mark.parametrize("value", ["-8", "0", "many", "1.5", "８"])
def test_numbers_have_to_be_in_range(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["Qwen3-4B", "--on", "8xH20", f"--tp={value}"])
    assert f"argument --tp: {value!r} is not a number from 1 to 2147483648" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_size": -1}, "has hidden_size=-1"),
        ({"head_dim": 0}, "has head_dim=0, which is not a positive number"),
        ({"head_dim": None, "hidden_size": 16}, "has hidden_size=16 below num_attention_heads=32, and no head_dim"),
        ({"num_key_value_heads": 0}, "has num_key_value_heads=0"),
        ({"num_key_value_heads": 7}, "has num_key_value_heads=7, which does not divide its 32 heads"),
        ({"intermediate_size": 0}, "has intermediate_size=0"),
        ({"num_hidden_layers": "four"}, "has num_hidden_layers='four'"),
        ({"num_hidden_layers": 2**30}, "has num_hidden_layers=1073741824"),
        ({"text_config": [1]}, "has text_config=[1]"),
        (
            {"num_experts": 2, "num_experts_per_tok": 8, "moe_intermediate_size": 4},
            "has num_experts_per_tok=8, above its 2",
        ),
        ({"num_experts": 2, "mlp_only_layers": "all"}, "has mlp_only_layers='all'"),
    ],
)
def test_an_unusable_config_json_is_refused_with_its_field(
    change: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["Qwen3-4B"], **change}))
    assert main([str(tmp_path), "--on", "8xH20"]) != 0
    assert message in capsys.readouterr().err


def test_imports_no_torch() -> None:
    code = "import sys, slime_like.planner.__main__; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
