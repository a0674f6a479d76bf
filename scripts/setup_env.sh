#!/usr/bin/env bash
# Make .venv and install f8sub there with the extras that the first argument names (train, or train,torchao,dev), in
# the versions of constraints.txt. Run again with nothing changed, it installs nothing. PYTHON=... picks the Python;
# VENV=... and CONSTRAINTS=... make another environment, of other versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup_env.sh: no Python 3.11 or newer found. Install one, or name it: PYTHON=/path/to/python3.11 $0" >&2
    exit 1
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

extras=${1:-train}
venv=${VENV:-.venv}
constraints=${CONSTRAINTS:-constraints.txt}
python=$venv/bin/python
torch=$(grep '^torch==' "$constraints")
# The environment belongs to this place, GPU or not, and torch; what is installed in it to the other files as well.
made="$PWD $torch GPU: $(has_gpu && echo yes || echo no)"
installed=$( (echo "$made"; cat "$constraints" pyproject.toml scripts/setup_env.sh) | sha256sum)
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

if [ "$(cat "$venv/made" 2>/dev/null)" != "$made" ] || ! "$python" -c '' 2>/dev/null; then
    if [ -L "$venv" ] || { [ -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/made" ]; }; then
        echo "setup_env.sh: $venv is a link or an environment that this script did not make; it is not overwritten." \
            "Remove it, or name another place: VENV=... $0" >&2
        exit 1
    fi
    base=$(find_python)
    echo "Making $venv with $("$base" -V) and PyTorch; this is done once."
    if ! "$base" -m venv --clear "$venv"; then
        echo "setup_env.sh: '$base -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    fi
    echo unfinished >"$venv/made"
    # torch alone and first, so that nothing later brings another one. Without a GPU the small CPU build will do.
    cpu_index=https://download.pytorch.org/whl/cpu
    if has_gpu || ! pip --no-deps --retries 1 --index-url $cpu_index "$torch" 2>/dev/null; then
        pip --no-deps "$torch"
    fi
    echo "$made" >"$venv/made"
fi
if [ "$(cat "$venv/installed.$extras" 2>/dev/null)" != "$installed" ]; then
    echo "Installing f8sub[$extras]; this is done once."
    pip --constraint "$constraints" --editable ".[$extras]"
    echo "$installed" >"$venv/installed.$extras"
fi
