#!/usr/bin/env bash
# The tests of torchtitan that ./scripts/test.sh cannot run, long ones too, each in an environment of its own:
#
#   ./scripts/test_torchtitan.sh 0.2         # torchtitan 0.2, with the torch of constraints.txt; 3 GB
#   ./scripts/test_torchtitan.sh torch2.11   # torchtitan 0.2 with torch 2.11, where it compiles tensor parallelism and
#                                            # checkpointing tags nodes; 6 GB
#   ./scripts/test_torchtitan.sh torch2.14   # torchtitan 0.3 with torch 2.14, for pipelines and spmd_types; 6 GB
#   ./scripts/test_torchtitan.sh all         # one after the other
#
# Further arguments go to pytest. Environments are made once, in .venv-torchtitan.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# run NAME 'VERSIONS' TESTS...: VERSIONS take the place of those of constraints.txt.
run() {
    local venv=.venv-torchtitan/$1 versions=$2
    shift 2
    mkdir -p .venv-torchtitan
    # Of triton, torch wants a version of its own.
    { grep -vE '^(torch|torchtitan|triton)==' constraints.txt; tr ' ' '\n' <<<"$versions"; } >"$venv.txt"
    VENV=$venv CONSTRAINTS=$venv.txt ./scripts/setup_env.sh train,torchao,torchtitan,dev
    "$venv/bin/python" -m pytest "$@"
}

of_0_2=(tests/features/torchtitan/test_{training,job_config}.py tests/scripts/test_titan.py)
of_2_11=(tests/features/checkpointing tests/features/swiglu_input)
titan_0_2() { run 0.2 "$(grep '^torch==' constraints.txt) torchtitan==0.2.2" "${of_0_2[@]}" "$@"; }
torch_2_11() { run torch2.11 "torch==2.11.0 torchtitan==0.2.2" "${of_0_2[@]}" "${of_2_11[@]}" "$@"; }
torch_2_14() { run torch2.14 "torch==2.14.1 torchtitan==0.3.0" tests/features/torchtitan "$@"; }

which=${1:-}
case "$which" in
    0.2) shift && titan_0_2 "$@" ;;
    torch2.11) shift && torch_2_11 "$@" ;;
    torch2.14) shift && torch_2_14 "$@" ;;
    all)
        shift
        titan_0_2 "$@"
        torch_2_11 "$@"
        torch_2_14 "$@"
        ;;
    *)
        echo "test_torchtitan.sh: which, 0.2, torch2.11, torch2.14 or all?" >&2
        exit 2
        ;;
esac
