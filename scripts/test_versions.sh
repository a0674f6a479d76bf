#!/usr/bin/env bash
# The tests with other versions of torch, Triton, torchtitan and the rest than those of constraints.txt, each row in an
# environment of its own:
#
#   ./scripts/test_versions.sh                  # lists the rows
#   ./scripts/test_versions.sh torch2.15        # makes the row's environment, once, and runs what the row is for
#   ./scripts/test_versions.sh torch2.15 tests/weights -k x   # runs pytest there with these arguments
#   ./scripts/test_versions.sh all
#
# Environments are made in .venv-versions: 1 GB with the torch of constraints.txt, 6 GB with another, which comes for
# CUDA. The row "newest" asks the index what is newest when it runs, and prints it. A row "over" has packages that go
# before those of .venv: the Triton of another torch, or a trainer, with the torch of constraints.txt, 0.5 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Row, a file of constraints and what takes the place of its lines, and what is run: the default suite, and the long
# tests of these files; where there is no suite, or the packages go over .venv's, all of their tests. Then f8sub's extras, if they are others than those
# of test.sh: TRL wants a newer datasets than torchtitan takes.
of_0_2="tests/integrations/torchtitan/test_training.py tests/integrations/torchtitan/test_job_config.py tests/scripts/test_titan.py"
# What axolotl and NeMo AutoModel import on a CPU, in the versions that they want; pip would bring CUDA's packages.
axolotl="axolotl==0.19.0 transformers==5.16.1 accelerate==1.13.0 peft==0.20.0 trl==1.9.0 torchao==0.17.0 datasets==4.8.4"
axolotl+=" huggingface-hub==1.17.0 tokenizers==0.23.1 pydantic==2.12.5 pydantic-core==2.41.5 typer==0.25.1 addict==2.4.0"
axolotl+=" art==6.5 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 backoff==2.2.1 bitsandbytes==0.50.2 fire==0.7.1"
axolotl+=" evaluate==0.4.1 fastcore==2.2.41 posthog==6.7.11 python-dotenv==1.0.1 schedulefree==1.4.1 scipy==1.17.1 six==1.17.0"
axolotl+=" numba==0.68.1 llvmlite==0.50.0 nvidia-ml-py==13.615.71 optimum==1.16.2 termcolor==3.3.0 trackio==0.19.0"
automodel="nemo-automodel==0.7.0 transformers==5.18.0 megatron-fsdp==0.5.0"
callers="tests/integrations/test_callers_of_torchao.py"
with_callers="train,torchao,torchtitan,trainers,dev"
rows="
torchtitan0.2 | constraints.txt        | torchtitan==0.2.2                             |       | $of_0_2
torch2.11     | constraints.txt        | torch==2.11.0 triton==3.6.0 torchtitan==0.2.2 | suite | $of_0_2 tests/linear/test_policies.py tests/linear/test_casts.py tests/convert/test_swiglu_input.py tests/convert/ranks
torch2.14     | constraints.txt        | torch==2.14.1 triton==3.8.0                   | suite | tests/integrations/torchtitan
torch2.15     | constraints-newest.txt |                                               | suite |
trl           | constraints.txt        | trl==1.16.0 datasets==5.2.0                   |       | tests/recipes/test_trl.py | train,trainers,trl,dev
triton3.6     | constraints.txt        | triton==3.6.0                                 | over  | tests/kernels/test_compiled.py -k test_every_kernel
axolotl       | constraints.txt        | $axolotl | over | $callers | $with_callers
automodel     | constraints.txt        | $automodel | over | $callers | $with_callers
newest        | constraints-newest.txt | torch triton torchtitan transformers accelerate peft lightning torchao | suite |
"

row_of() { awk -F'|' -v row="$1" '{ name = $1; gsub(/ /, "", name); if (name == row) print }' <<<"$rows"; }
field() { cut -d'|' -f"$1" <<<"$2" | sed -E 's/^ +| +$//g'; }

latest() {  # a package's newest release on the index, as in torch==2.15.0
    local found
    found=$("$python" -m pip index versions "$1" 2>/dev/null | sed -nE '1s/.*\((.*)\)/\1/p')
    [ -n "$found" ] || { echo "test_versions.sh: the index has no $1" >&2; return 1; }
    echo "$1==$found"
}

run_over() {  # folder, packages and versions in one word, arguments of pytest
    local folder=$1 packages=$2 package found
    shift 2
    ./scripts/setup_env.sh "${EXTRAS:-dev,torchtitan}"
    if [ ! -e "$folder/complete" ]; then
        rm -rf "$folder"
        # shellcheck disable=SC2086  # several words
        .venv/bin/python -m pip install --quiet --no-deps --target "$folder" $packages
        touch "$folder/complete"
    fi
    export PYTHONPATH=$folder:$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    for package in $packages; do
        found=$(.venv/bin/python -c "import importlib.metadata as m; print(m.version('${package%%==*}'))")
        [ "$found" = "${package##*==}" ] || { echo "test_versions.sh: found $found, not $package" >&2; return 1; }
    done
    .venv/bin/python -m pytest -q "$@"
}

run() {  # row, arguments of pytest
    local name=$1 row base versions suite long pins='' package
    row=$(row_of "$name")
    shift
    base=$(field 2 "$row") versions=$(field 3 "$row") suite=$(field 4 "$row") long=$(field 5 "$row")
    EXTRAS=$(field 6 "$row")
    export EXTRAS
    python=$(command -v python3.11 || command -v python3)
    for package in $versions; do
        case $package in *==*) pins+="$package " ;; *) pins+="$(latest "$package") " ;; esac
    done
    mkdir -p .venv-versions
    if [ "$suite" = over ]; then
        echo "== $name: $pins over .venv"
        # shellcheck disable=SC2086  # several words
        (run_over "$PWD/.venv-versions/$name" "${pins% }" ${*:-$long})
        return
    fi
    export VENV=.venv-versions/$name CONSTRAINTS=.venv-versions/$name.txt
    local replaced
    replaced=$(tr ' ' '\n' <<<"$pins" | sed -nE 's/==.*//p' | paste -sd'|')
    { grep -vE "^(${replaced:-none})==" "$base"; tr ' ' '\n' <<<"$pins"; } >"$CONSTRAINTS"
    echo "== $name: $base $pins"
    if [ $# -gt 0 ]; then
        ./scripts/test.sh --all "$@"
        return
    fi
    local status=0
    [ -z "$suite" ] || ./scripts/test.sh || status=$?
    # shellcheck disable=SC2086  # several paths
    [ -z "$long" ] || ./scripts/test.sh --all $long -m "${suite:+long}" || status=$?
    return $status
}

which=${1:-}
if [ -z "$which" ]; then
    echo "Rows:"
    sed '/^$/d; s/^/  /' <<<"$rows"
    exit
fi
shift
if [ "$which" = all ]; then
    names=$(cut -d'|' -f1 <<<"$rows")
else
    names=$which
fi
status=0
for name in $names; do
    if [ -z "$(row_of "$name")" ]; then
        echo "test_versions.sh: no row $name. Rows: $(cut -d'|' -f1 <<<"$rows" | xargs)" >&2
        exit 2
    fi
    run "$name" "$@" || status=$?
done
exit "$status"
