"""Make the pictures of docs/watching.md from a new run: the live view on a terminal, and report.html in a browser.

python scripts/screenshots.py [--folder FOLDER] [--out docs/images] [train.py's arguments]

The script runs ``train.py +recipe=quickstart`` (or the given arguments) on a pseudo-terminal, requests a checkpoint and an
evaluation halfway as scripts/control.py does, and takes pictures of the first frame of the live view that shows the saved
checkpoint, and of the report, in a headless browser. With the folder of an earlier call, it takes them without a new run.
It fails if a page writes to the browser's console or requests another resource.
tests/report/browser.py describes how the browser is found.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from slime_like.cluster.run.control import Request  # noqa: E402
from slime_like.cluster.run.control_client import read_live_status, send_request  # noqa: E402  (found by the line above)
from slime_like.errors import SlimeLikeError  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.report.write import write_report  # noqa: E402
from tests.report.browser import VARIABLE, find_browser, look  # noqa: E402
from tests.report.terminal import frames, on_terminal, write_page  # noqa: E402

JOB = ("+recipe=quickstart", "loop.num_rollout=40", "weights.probe_layers=true")
ALWAYS = ("run.dump_rollouts=true", "metrics.console=live")
REQUIRED_TEXT = "control: save: done"
TERMINAL = "terminal.log"
LIVE_HEIGHT, REPORT_HEIGHT, TOKENS_HEIGHT = 480, 1500, 900


class MidRunRequests:
    """Callback that requests a checkpoint and an evaluation once, when half of the rollouts are done."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._has_sent = False

    def __call__(self) -> None:
        """Check the progress of the run, and send the requests if it is halfway."""
        if self._has_sent or not (self._run_dir / "status.json").is_file():
            return
        status = read_live_status(self._run_dir)
        if status.step >= status.num_steps // 2:
            send_request(self._run_dir, Request.EVAL)
            send_request(self._run_dir, Request.SAVE)
            self._has_sent = True


def main(argv: list[str]) -> int:
    """Run the job, unless ``--folder`` has the output of one, and write the pictures.

    Return the exit code: 0 on success; 2 if there is no browser; 1 after any other failure.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="folder for the run, or of the run of an earlier call; default: temporary"
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images", help="folder for the pictures")
    args, job = parser.parse_known_args(argv)
    if (browser := find_browser()) is None:
        sys.stderr.write(
            visible(f"no browser on PATH, none of Playwright's, no {VARIABLE}: see tests/report/browser.py\n")
        )
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = (args.folder or Path(scratch) / "run").resolve()
        if not (run_dir / TERMINAL).is_file() and not run(run_dir, job or list(JOB)):
            return 1
        output = (run_dir / TERMINAL).read_bytes().decode()
        write_report(run_dir)
        matching_frames = [frame for frame in frames(output) if REQUIRED_TEXT in frame]
        if not matching_frames:
            sys.stderr.write(visible(f"no frame of the live view contains {REQUIRED_TEXT!r}\n"))
            return 1
        live = Path(scratch) / "live.html"
        write_page(matching_frames[0], live)
        report = run_dir / "report.html"
        args.out.mkdir(parents=True, exist_ok=True)
        pictures = (
            ("live.png", live, 1000, LIVE_HEIGHT, None),
            ("report.png", report, 1320, REPORT_HEIGHT, None),
            ("report_difference.png", report, 1320, TOKENS_HEIGHT, "Trainer and engine"),
            ("report_tokens.png", report, 1320, TOKENS_HEIGHT, "Sampled tokens"),
        )
        complaints: list[str] = []
        for name, page, width, height, at in pictures:
            image = look(browser, page, width=width, height=height, at=at)
            (args.out / name).write_bytes(image.png)
            print(
                visible(
                    f"{args.out / name}: {len(image.png)} bytes, {len(image.complaints)} complaints, {len(image.loaded_urls)} loaded"
                )
            )
            complaints += [f"{page.name}: {text}" for text in (*image.complaints, *image.loaded_urls)]
    sys.stderr.write(visible("".join(f"{text}\n" for text in complaints)))
    return 1 if complaints else 0


def run(run_dir: Path, job: list[str]) -> bool:
    """Run the job and save its terminal output in ``run_dir``.

    If the job fails, print the end of the output instead and return False.
    """
    command = [sys.executable, str(REPOSITORY / "train.py"), *job, *ALWAYS, f"run.dir={run_dir}"]
    code, output = on_terminal(command, os.environ | {"TERM": "xterm-256color"}, MidRunRequests(run_dir))
    if code:
        sys.stderr.write(visible(output[-3000:]))
        return False
    (run_dir / TERMINAL).write_text(output, newline="")
    return True


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SlimeLikeError as error:
        sys.exit(visible(f"{type(error).__name__}: {error}"))
