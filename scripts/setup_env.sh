#!/usr/bin/env bash
# Make .venv and install f8sub with everything its recipes and tests need, in the versions of constraints.txt.
# Run again with nothing changed, it installs nothing. PYTHON=... picks the Python to make it with.
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

venv=.venv
python=$venv/bin/python
# What was installed, and where: a moved or changed tree installs again.
wanted=$( (echo "$PWD" "$(has_gpu && echo gpu)"; cat constraints.txt pyproject.toml scripts/setup_env.sh) | sha256sum)
if [ "$(cat $venv/installed 2>/dev/null)" = "$wanted" ] && "$python" -c 'import torch, f8sub' 2>/dev/null; then
    exit 0
fi

base=$(find_python)
echo "Making $venv with $("$base" -V); this is done once."
if ! "$base" -m venv --clear $venv; then
    echo "setup_env.sh: '$base -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
fi
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
torch=$(grep '^torch==' constraints.txt)
# torch alone and first, so that nothing below can bring another one. Without a GPU the small CPU build will do.
if has_gpu || ! pip --no-deps --retries 1 --index-url https://download.pytorch.org/whl/cpu "$torch" 2>/dev/null; then
    pip --no-deps "$torch"
fi
pip --constraint constraints.txt --editable '.[train,torchao,dev]'
echo "$wanted" >$venv/installed
