"""Address and token of a job server."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from slime_like.errors import ConfigError

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
TOKEN_VARIABLE, TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
TOKEN_FILE = Path(".ray") / "auth_token"  # in the home folder
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """URL of a job server, and the authentication token of its cluster."""

    url: str
    token: str | None = field(default=None, repr=False)

    @property
    def is_local(self) -> bool:
        """True if the URL's host is a loopback address, for example the local end of an ssh tunnel."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def server_address(address: str | None, environment: Mapping[str, str]) -> ServerAddress:
    """Return the URL of the job server and the token of its cluster.

    The URL is ``address``, else ``RAY_API_SERVER_ADDRESS`` if set, else ``DEFAULT_ADDRESS``. The token comes from the first
    of Ray's sources that is set: ``RAY_AUTH_TOKEN``, the file named by ``RAY_AUTH_TOKEN_PATH``, ``~/.ray/auth_token``.
    Raises ``ConfigError`` naming the option or variable if the address is invalid or contains a user or password, or if
    the file named by ``RAY_AUTH_TOKEN_PATH`` cannot be read.
    """
    source = "--address" if address is not None else ADDRESS_VARIABLE
    text = address if address is not None else environment.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS)
    if "@" in text:  # checked first, because the other message repeats the address
        raise ConfigError(f"{source} contains a user or password: remove both, and set {TOKEN_VARIABLE}")
    if (url := _base_url(text)) is None:
        raise ConfigError(
            f"{source}={text!r} is not the address of a job server: write http://HOST:PORT of the head's dashboard, such as "
            f"{DEFAULT_ADDRESS}"
        )
    return ServerAddress(url, read_token(environment))


def _base_url(text: str) -> str | None:
    """Return scheme, host and port of a URL that has nothing else; None if ``text`` is not such a URL."""
    try:
        parts = urlsplit(text)
        is_complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        return None
    has_more = parts.path.strip("/") or parts.query or parts.fragment
    return f"{parts.scheme}://{parts.netloc}" if is_complete and not has_more else None


def read_token(environment: Mapping[str, str]) -> str | None:
    """Return the cluster's token, or None if there is none.

    Raises ``ConfigError`` if the file named by ``RAY_AUTH_TOKEN_PATH`` cannot be read.
    """
    if token := environment.get(TOKEN_VARIABLE, "").strip():
        return token
    token_path = environment.get(TOKEN_PATH_VARIABLE)
    path = Path(token_path) if token_path else Path(environment.get("HOME") or os.path.expanduser("~")) / TOKEN_FILE
    try:
        with path.open("rb") as file:
            return file.read(MAX_TOKEN_BYTES).decode().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        if token_path is None:
            return None
        raise ConfigError(f"{TOKEN_PATH_VARIABLE}={token_path!r} cannot be read ({error}): correct the path") from error
