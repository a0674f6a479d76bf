#!/usr/bin/env bash
# Lint, types and tests. Arguments go to pytest; --all adds the tests marked long.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup_env.sh train,torchao,torchtitan,trainers,dev

selection=(-m "not long")
arguments=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then
        selection=()
    else
        arguments+=("$argument")
    fi
done
bin=.venv/bin
$bin/ruff check
$bin/ruff format --check
$bin/mypy
# The recipes import each other as a script's neighbours do, and libraries without types.
(cd recipes && "../$bin/mypy" --config-file ../pyproject.toml --cache-dir ../.mypy_cache --implicit-reexport --allow-untyped-calls \
    --ignore-missing-imports ./*.py)
# What accelerate and Lightning import takes minutes to read.
(cd recipes/trainers && "../../$bin/mypy" --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache/trainers \
    --allow-untyped-calls --allow-subclassing-any --ignore-missing-imports --follow-imports skip ./*.py)
exec $bin/python -m pytest "${selection[@]}" "${arguments[@]}"
