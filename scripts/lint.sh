#!/usr/bin/env bash
# Lint of everything, and types of the library and the recipes: ruff and mypy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup_env.sh train,torchao,torchtitan,trainers,docs,release,dev

bin=$PWD/.venv/bin
"$bin/ruff" check
"$bin/ruff" format --check
"$bin/mypy"
# The recipes import each other as a script's neighbours do, and they import libraries that have no types.
(cd recipes && "$bin/mypy" --config-file ../pyproject.toml --cache-dir ../.mypy_cache/recipes --implicit-reexport \
    --allow-untyped-calls --ignore-missing-imports ./*.py f8sub_pretrain/*.py)
# What accelerate and Lightning import takes minutes to read, so mypy does not follow it.
(cd recipes/trainers && "$bin/mypy" --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache/trainers \
    --allow-untyped-calls --allow-subclassing-any --ignore-missing-imports --follow-imports skip ./*.py)
