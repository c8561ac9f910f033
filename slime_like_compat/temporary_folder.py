"""Temporary folder in which a recipe is written to be checked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from slime_like.errors import SlimeLikeError
from slime_like.util.reading import reason


@contextmanager
def temporary_folder(file: str = "", text: str = "") -> Generator[Path]:
    """Yield a temporary folder and remove it at the end of the block; if ``file`` is given, it contains ``text`` at this path.

    Raises ``SlimeLikeError`` if the folder or the file cannot be written. It is no ``ConfigError``, because it does not
    depend on the job.
    """
    with ExitStack() as stack:
        target: object = "the temporary folder"
        try:
            folder = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
            if file:
                target = path = folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        except OSError as error:
            raise SlimeLikeError(
                f"{target} cannot be written ({reason(error)}), and each recipe is checked in a temporary folder: free space "
                "there, or set TMPDIR to a folder that can be written"
            ) from error
        yield folder
