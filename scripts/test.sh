#!/usr/bin/env bash
# The tests, without lint and types (./scripts/lint.sh).
#
#   ./scripts/test.sh                  # everything but the long tests
#   ./scripts/test.sh --all            # everything
#   ./scripts/test.sh --quick          # does f8sub work on this machine? 1 minute
#   ./scripts/test.sh tests/weights -k x  # one pytest process with these arguments
#
# VENV, CONSTRAINTS and EXTRAS name another environment, see setup_env.sh; ./scripts/test_versions.sh has a table of such.
#
# Without arguments for pytest, two pytest processes run side by side and end together: "jobs" runs tests/recipes,
# torchtitan's folder and tests/docs, "one" all others. Files of folders named ranks come last, and the process that
# comes to one first runs it, see tests/lanes.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not long") quick='' arguments=()
for argument in "$@"; do
    case $argument in
    --all) selection=() ;;
    --quick) quick=yes ;;
    *::*) selection=() arguments+=("$argument") ;;  # a test that is named runs, long or not
    *) arguments+=("$argument") ;;
    esac
done

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE  # or each of the processes that tests start would compile f8sub again
python=${VENV:-.venv}/bin/python
if [ -n "$quick" ]; then
    ./scripts/setup_env.sh dev
    $python -m pytest -q tests/test_this_machine.py "${arguments[@]}"
    exec $python -c 'import torch
has_units = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)  # Ada, the first with float8
units = "It has float8 units." if has_units else "It has no float8 units, so float8 is emulated and slower than bf16."
print(f"f8sub works on this machine. {units}")'
fi
./scripts/setup_env.sh "${EXTRAS:-train,torchao,torchtitan,trainers,docs,release,dev}"
if [ ${#arguments[@]} -gt 0 ]; then
    exec $python -m pytest -q "${selection[@]}" "${arguments[@]}"
fi

logs=$(mktemp -d) taken=$(mktemp -d)
trap 'rm -rf "$logs" "$taken"' EXIT
run_lane() {  # name, arguments of pytest
    local name=$1
    shift
    # read and printf print whole lines, so that the two lanes do not cut each other's.
    F8SUB_TEST_LANE=$name F8SUB_TEST_TAKEN=$taken $python -m pytest -q "${selection[@]}" "$@" 2>&1 | tee "$logs/$name" |
        while IFS= read -r line; do printf '%s\n' "$line"; done
}
jobs=(tests/recipes tests/integrations/torchtitan tests/docs)
mapfile -t with_ranks < <(find tests -type d -name ranks | sort)
run_lane jobs "${jobs[@]}" "${with_ranks[@]}" &
other=$!
status=0
run_lane one tests "${jobs[@]/#/--ignore=}" || status=$?
wait $other || status=$?

# pytest's own last line of each lane, as in "5 passed, 1 failed in 3.20s": what ends after pytest may print more.
closing=$(for log in "$logs"/*; do
    grep -E '^(no tests ran|[0-9]+ [a-z]+(, [0-9]+ [a-z]+)*) in [0-9.]+s( \([0-9:, a-z]+\))?$' "$log" | tail -n 1 |
        grep . || echo "pytest did not come to its end in the lane $(basename "$log")"
done)
count() {  # the sum of what both lanes say
    grep -oE "[0-9]+ $1" <<<"$closing" | awk '{ sum += $1 } END { print sum + 0 }'
}
echo
grep -hE '^(FAILED|ERROR) ' "$logs"/* || true
echo "$closing"
echo "$(count passed) passed, $(($(count failed) + $(count error))) failed, $(count skipped) skipped"
exit $status
