"""Execute the lines of docker/Dockerfile in a clean root folder with chroot, for a machine without an image builder; needs root.

python3 scripts/image_root.py FOLDER --device cpu --python /usr/local      # then print the quickstart's plan
python3 scripts/image_root.py FOLDER --device gpu -- .venv/bin/python train.py +recipe=one_gpu --plan-for 1xH200

FOLDER is a Debian or Ubuntu root folder (debootstrap) in place of the base image: docker/README.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import stat
import string
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from slime_like.printable import visible  # noqa: E402

DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
PLAN = (".venv/bin/python", "train.py", "+recipe=quickstart", "--plan")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of the base images
CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE")  # a proxy may need them
SETTINGS = (*CERTIFICATES, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "HTTPS_PROXY", "https_proxy")
# Nothing that a command has mounted or started remains, even if this process is killed.
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
CHROOT = 'mount -t proc proc "$0/proc" && exec chroot "$@"'


class ImageError(Exception):
    """An unusable root, or a line of the Dockerfile that cannot be executed."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A line of the Dockerfile."""

    name: str
    options: dict[str, str]
    arguments: str


@dataclass(frozen=True, slots=True)
class Options:
    """Root, build argument, Python to copy, and deviations from the image that save time."""

    root: Path
    device: str
    python: Path | None
    uv_cache: Path | None
    bytecode: bool


@dataclass(slots=True)
class Image:
    """Settings of the image after the lines executed so far."""

    arguments: dict[str, str]
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "HOME": "/root"})
    user: str = "0:0"
    folder: str = "/"
    entrypoint: tuple[str, ...] = ()

    def expand(self, text: str) -> str:
        """Return ``text``, the arguments of an ENV line, with build arguments and environment variables replaced by their values.

        Raises ``ImageError`` if a variable is undefined, or is not written as $NAME or ${NAME}.
        """
        try:
            return string.Template(text).substitute({**self.arguments, **self.environment})
        except KeyError as error:
            raise ImageError(f"ENV {text}: no line above defines {error.args[0]}; add an ENV line") from error
        except ValueError as error:
            raise ImageError(f"ENV {text}: {error}; write $NAME or ${{NAME}}") from error


def instructions(text: str) -> list[Instruction]:
    """Return the lines of a Dockerfile's last stage, without its FROM."""
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [_instruction(line) for line in text.splitlines() if line.strip()]
    last_from = max(index for index, line in enumerate(lines) if line.name == "FROM")
    return lines[last_from + 1 :]


def _instruction(line: str) -> Instruction:
    name, _, arguments = line.strip().partition(" ")
    options = dict[str, str]()
    while match := re.match(r"--(\w+)=(\S+)\s+", arguments):
        options[match[1]] = match[2]
        arguments = arguments[match.end() :]
    return Instruction(name, options, arguments)


def context() -> list[str]:
    """Return the files of the build context: those that git does not ignore and .dockerignore does not exclude."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    patterns = (REPOSITORY / ".dockerignore").read_text().split()
    return [name for name in names if (REPOSITORY / name).is_file() and not excluded(name, patterns)]


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a line of .dockerignore matches the file or a folder above it."""
    path = PurePosixPath(name)
    paths = [str(part) for part in (path, *path.parents)]
    either = [*patterns, *(pattern.removeprefix("**/") for pattern in patterns)]  # ** also stands for no folder
    return any(fnmatchcase(part, pattern) for pattern in either for part in paths)


def prepare(options: Options) -> None:
    """Add the files that a base image and a container engine would provide.

    Raises ``ImageError`` if the root has no apt-get.
    """
    root = options.root
    if not os.access(root / "usr/bin/apt-get", os.X_OK):
        raise ImageError(f"{root} is not a Debian or Ubuntu root: create it with debootstrap")
    if not (random := root / "dev/urandom").exists():
        os.mknod(random, 0o666 | stat.S_IFCHR, os.makedev(1, 9))
    (root / "dev/shm").mkdir(exist_ok=True)
    (root / "dev/shm").chmod(0o1777)  # for the semaphores of compileall
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    if options.python is not None:
        subprocess.run(["cp", "--archive", f"{options.python}/.", root / "usr/local"], check=True)
    subprocess.run(["chroot", root, "/sbin/ldconfig"], check=True)  # Python may have shared libraries


def build(lines: Sequence[Instruction], options: Options) -> Image:
    """Execute the lines and return the image's settings. Raises ``ImageError`` if a line is not supported or fails."""
    image = Image({"DEVICE": options.device})
    for line in lines:
        print(visible(f"== {line.name} {line.arguments}"), flush=True)
        match line.name:
            case "ARG" if line.arguments.partition("=")[0] in image.arguments:
                pass
            case "ARG" if "=" in line.arguments:
                name, _, default = line.arguments.partition("=")
                image.arguments[name] = "".join(shlex.split(default))
            case "ENV":
                pairs = [image.expand(word).partition("=") for word in shlex.split(line.arguments)]
                image.environment |= {name: value for name, _, value in pairs}
            case "WORKDIR":
                image.folder = line.arguments
                make_folder(inside(options.root, image, "."), (os.geteuid(), os.getegid()))
            case "USER":
                image.user = line.arguments
            case "COPY":
                copy(line, image, options.root)
            case "RUN":
                run(line, image, options)
            case "ENTRYPOINT":
                image.entrypoint = tuple(json.loads(line.arguments))
            case "CMD":
                pass
            case _:
                raise ImageError(f"{line.name} {line.arguments}: this line is not supported here")
    return image


def inside(root: Path, image: Image, path: str) -> Path:
    """Return this machine's path, below ``root``, of a file with the given ``path`` in the image.

    A relative ``path`` begins at the image's working folder.
    """
    return root / str(PurePosixPath(image.folder) / path).lstrip("/")


def make_folder(path: Path, owner: tuple[int, int]) -> None:
    """Create the folder and its missing parents with this owner; existing folders keep theirs."""
    if not path.is_dir():
        make_folder(path.parent, owner)
        path.mkdir()
        os.chown(path, *owner)


def copy(line: Instruction, image: Image, root: Path) -> None:
    """Execute a COPY line with files of the build context. Raises ``ImageError`` if one of its sources matches no file."""
    *sources, target = shlex.split(line.arguments)
    user, _, group = line.options.get("chown", "0:0").partition(":")
    owner = (int(user), int(group))
    files = context()
    for source in sources:
        source = "" if source == "." else source.rstrip("/")
        names = [name for name in files if not source or name == source or name.startswith(f"{source}/")]
        if not names:
            raise ImageError(f"COPY {source}: the build context has no such file")
        for name in names:
            relative = PurePosixPath(name).name if name == source and target.endswith("/") else name[len(source) :]
            path = inside(root, image, f"{target}/{relative}")
            make_folder(path.parent, owner)
            shutil.copy2(REPOSITORY / name, path)
            os.chown(path, *owner)


def run(line: Instruction, image: Image, options: Options) -> None:
    """Execute a RUN line with the image's variables and this machine's values of ``SETTINGS``.

    First copy to the root the files that the variables in ``CERTIFICATES`` name, and fill the line's cache mount from
    the field ``uv_cache`` of ``options``. Raises ``ImageError`` if the line fails.
    """
    environment = image.environment | {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
    for name in CERTIFICATES:
        if (certificates := Path(environment.get(name, ""))).is_file():
            make_folder(copied := options.root / str(certificates.parent).lstrip("/"), (0, 0))
            shutil.copy(certificates, copied)
    if "mount" in line.options and options.uv_cache is not None:
        link_cache(line.options["mount"], options.uv_cache, options.root)
        environment["UV_LINK_MODE"] = "symlink"  # the image's user may not create hard links to files of another user
    if not options.bytecode:
        environment["SLIME_LIKE_BYTECODE"] = "off"
    code = enter(["/bin/sh", "-c", line.arguments], image, options.root, environment)
    if code:
        raise ImageError(f"RUN {line.arguments}: exit code {code}")


def link_cache(mount: str, cache: Path, root: Path) -> None:
    """Fill the folder of a cache mount with hard links to the files of ``cache``, unless the folder has files already.

    The mount's user owns the folder and its subfolders. Hidden files in its upper two levels are left out.
    """
    fields = dict(part.split("=", 1) for part in mount.split(","))
    folder = root / fields["target"].lstrip("/")
    if any(folder.iterdir()):
        return  # another line has done it
    subprocess.run(["cp", "--archive", "--link", f"{cache}/.", folder], check=True)
    for path, _, _ in os.walk(folder):
        os.chown(path, int(fields["uid"]), int(fields["gid"]))
    for pattern in (".*", "*/.*"):  # uv writes to these markers and locks, which another user owns
        for path in folder.glob(pattern):
            path.unlink()


def enter(words: Sequence[str], image: Image, root: Path, environment: dict[str, str]) -> int:
    """Run a command in the root as the image's user and in its working folder; return the exit code."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    command = ["/usr/bin/env", "--ignore-environment", f"--chdir={image.folder}", *settings, *words]
    chroot = [*NAMESPACES, "sh", "-c", CHROOT, root, f"--userspec={image.user}", root]
    return subprocess.run([*chroot, *command]).returncode


def main(argv: Sequence[str]) -> int:
    """Build, then run the entry point with the command; return its exit code, or 1 if the root is unusable or a line failed."""
    split = argv.index("--") if "--" in argv else len(argv)
    command = argv[split + 1 :] or PLAN
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "-- COMMAND ...: runs in the root at the end; default: print the quickstart's plan"
    parser.add_argument("root", type=Path, metavar="FOLDER", help="Debian or Ubuntu root")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--python", type=Path, metavar="PREFIX", help="Python 3.12 to copy, unless the root's packages have it"
    )
    parser.add_argument(
        "--uv-cache", type=Path, metavar="FOLDER", help="packages are linked to this cache of uv, not copied"
    )
    parser.add_argument("--no-bytecode", action="store_true", help="do not compile packages")
    args = parser.parse_args(argv[:split])
    options = Options(args.root, args.device, args.python, args.uv_cache, not args.no_bytecode)
    try:
        prepare(options)
        image = build(instructions(DOCKERFILE.read_text()), options)
    except ImageError as error:
        print(visible(f"image_root: {error}"), file=sys.stderr)
        return 1
    print(visible(f"== {shlex.join([*image.entrypoint, *command])}"), flush=True)
    return enter([*image.entrypoint, *command], image, options.root, image.environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
