#!/usr/bin/env bash
# Print the versions in the image on stderr, then run the command in this process's place, so that signals reach it.
set -euo pipefail
/slime_like/.venv/bin/python /slime_like/scripts/print_versions.py >&2
exec "$@"
