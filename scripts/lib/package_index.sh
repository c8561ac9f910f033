# Sourced: uv does not read pip's settings. Unless uv has its own, pass it the index, files and certificates configured for
# pip, so that a company's mirror or proxy is used by both.

# pip_setting NAME: print pip's setting (environment before pip.conf), or nothing.
pip_setting() {
    sed -n "s/^:env:\.$1='\(.*\)'$/\1/p" <<<"$PIP_SETTINGS" | grep . ||
        sed -n -E "s/^(global|install)\.$1='(.*)'$/\2/p" <<<"$PIP_SETTINGS" | tail -n 1
}

# default VARIABLE VALUE: export it unless it is set or the value is empty.
default() {
    [[ -n ${!1:-} || -z $2 ]] || export "$1=$2"
}

# use_pip_settings: export pip's settings as uv's where uv has none. Needs .venv's pip.
use_pip_settings() {
    PIP_SETTINGS=$("$PYTHON" -m pip config list 2>/dev/null || true)
    default UV_DEFAULT_INDEX "${UV_INDEX_URL:-$(pip_setting index-url)}"
    default UV_INDEX "${UV_EXTRA_INDEX_URL:-$(pip_setting extra-index-url | tr '\n' ' ')}"
    default UV_FIND_LINKS "$(pip_setting find-links)"
    default SSL_CERT_FILE "$(pip_setting cert)"
}
