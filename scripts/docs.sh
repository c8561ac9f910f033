#!/usr/bin/env bash
# Build docs/ into build/site with mkdocs-material, in a separate environment. A dead link is an error.
#
#   bash scripts/docs.sh          # build/site/index.html
#   bash scripts/docs.sh serve    # serve on 127.0.0.1:8000, rebuilt after each change
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$REPO/scripts/lib/find_python.sh"
cd "$REPO"
trap 'exit 130' INT # even if the interrupted command exits differently

case ${1:-} in
    '') command=(build --strict) ;;
    serve) command=(serve --strict) ;;
    *) fail "unknown argument '$1': serve or none" ;;
esac
environment=build/docs_venv
[[ -x $environment/bin/pip ]] || "$(find_python)" -m venv "$environment"
"$environment/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r scripts/requirements/docs.lock
NO_MKDOCS_2_WARNING=1 "$environment/bin/mkdocs" "${command[@]}"
[[ ${1:-} == serve ]] || say "build/site/index.html"
