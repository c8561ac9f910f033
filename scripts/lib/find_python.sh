# Sourced: find_python prints the path of a working Python 3.12 that can create virtual environments.

# Program for a candidate. It prints the interpreter behind shims and environments, or exits with the reason against it.
PYTHON_TEST='
import sys
if sys.version_info[:2] != (3, 12) or sys.implementation.name != "cpython":
    sys.exit("is %s %d.%d" % ((sys.implementation.name,) + sys.version_info[:2]))
try:
    import ensurepip, venv
except ImportError:
    sys.exit("has no ensurepip: install python3.12-venv")
print(getattr(sys, "_base_executable", None) or sys.executable)
'

# python_candidates: print one path per line, best first, from PATH, uv and pyenv; some may not work.
python_candidates() {
    type -aP python3.12 || true
    type -aP python3 || true
    if type -P uv >/dev/null; then
        uv python find --no-project --system 3.12 2>/dev/null || true
    fi
    local root
    while read -r root; do
        compgen -G "$root/versions/3.12*/bin/python3.12" | sort -Vr || true
    done < <(pyenv_roots)
}

# pyenv_roots: print folders that may contain pyenv's versions; shims on PATH are used too, since HOME may be empty.
pyenv_roots() {
    local -a folders
    IFS=: read -ra folders <<<"$PATH"
    {
        [[ -z ${PYENV_ROOT:-} ]] || printf '%s\n' "$PYENV_ROOT"
        [[ -z ${HOME:-} ]] || printf '%s\n' "$HOME/.pyenv"
        local folder
        for folder in "${folders[@]}"; do
            [[ $folder != */shims && $folder != */shims/ ]] || dirname "$folder"
        done
    } | awk '!seen[$0]++'
}

# find_python: print the first usable candidate; otherwise fail with the candidates tried and a way to install Python.
find_python() {
    local candidate answer last tried=''
    while read -r candidate; do
        if answer=$("$candidate" -c "$PYTHON_TEST" 2>&1 </dev/null) && [[ -x ${answer##*$'\n'} ]]; then
            printf '%s\n' "${answer##*$'\n'}" # last line only: shims and locales may print warnings first
            return
        fi
        last=${answer##*$'\n'}
        [[ $last == is\ * || $last == has\ * ]] || last="does not run"
        tried+=$'\n'"    $candidate $last"
    done < <(python_candidates | awk '!seen[$0]++')
    fail "no Python 3.12 that works was found on PATH, by uv or under pyenv.${tried:+ Seen:$tried}
  Get one by any of these, then run this again:
    apt-get install python3.12 python3.12-venv     (Ubuntu 24.04, as root)
    uv python install 3.12                         (https://docs.astral.sh/uv)
    pyenv install 3.12                             (https://github.com/pyenv/pyenv)
    or the CPU image, which has it: docker/README.md"
}
