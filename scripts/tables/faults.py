"""Every fault that a library can meet: what must happen then, and the tests that make it happen.

Without arguments each test is run, and the table says how many cases there were and how many went as they must; some
take minutes. With --list it is the table of tests alone.

    python scripts/tables/faults.py --write-docs
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from scripts.table import ROOT, Table, finish, parser

LISTED = """
NaN or infinity in an x: NaN in its row of y and nowhere else; named by `find_nonfinite`
    tests/contract/test_linear_numerics.py::test_non_finite_elements_stay_where_they_are
    tests/diagnostics/ranks/test_find_nonfinite.py::test_the_first_layer_role_and_rank
NaN or infinity in one rank's shard: NaN codes on all ranks at once, then an error that names the layer
    tests/weights/ranks/test_non_finite.py::test_one_rank_s_bad_element_is_everyone_s
    tests/weights/ranks/test_non_finite.py::test_a_bad_element_shows_on_every_rank_without_precompute_scales_too
NaN or infinity in a gradient: the step is none, bitwise, on all ranks; or the first layer, role and rank are named
    tests/contract/test_linear_numerics.py::test_non_finite_elements_stay_where_they_are
    tests/diagnostics/test_step_guard.py::test_a_run_with_bad_steps_is_the_run_without_them
    tests/diagnostics/ranks/test_step_guard.py::test_one_rank_s_bad_batch_skips_the_step_of_all
    tests/diagnostics/ranks/test_find_nonfinite.py::test_gradients_that_overflow_on_the_way
zero tensors, rows, blocks: exact zeros, scale 1
    tests/kernels/test_against_casts.py::test_edge_values
subnormal values, any float32 bits: codes and scales are the float64 oracle's; no infinite scale
    tests/kernels/test_reference.py::test_scales_of_every_power_of_two_amax
    tests/contract/test_linear_numerics.py::test_any_float32_bits
the largest number of a dtype: dequantizes to a finite number
    tests/contract/test_linear_numerics.py::test_the_largest_number_stands_for_a_finite_one_nearby
a batch of no rows, on all ranks or on one: (0, N); zero gradients, bitwise what a loss of weight 0 gives
    tests/linear/test_linear.py::test_a_batch_of_no_rows
    tests/faults/ranks/test_inputs.py::test_a_batch_of_no_rows_on_one_rank_alone
rows that the ranks do not divide, fewer rows than ranks: gathered bitwise as the whole weight is quantized
    tests/weights/ranks/test_gathered_weight.py::test_any_number_of_rows
dims that are no multiple of 16: the layer is skipped, with the reason
    tests/convert/test_filters.py::test_dims_have_to_be_multiples_of_16
x and w of different dtypes, fp16, integers: computed as documented, or a TypeError that names the layer
    tests/linear/test_linear.py::test_x_and_w_of_different_dtypes
    tests/contract/test_linear_numerics.py::test_fp16
    tests/linear/test_linear_work.py::test_an_input_of_another_kind_names_the_layer
converted twice, after `fully_shard`, or nothing to convert: a warning that changes nothing, or a typed error
    tests/convert/test_convert.py::test_converting_twice_is_a_warning_and_changes_nothing
    tests/convert/test_convert.py::test_converting_with_another_recipe_is_an_error
    tests/convert/test_convert.py::test_converting_after_fully_shard_is_an_error
    tests/convert/test_convert.py::test_nothing_to_convert_is_an_error
a rank with another recipe, format, option, dtype or f8sub: `Float8RankMismatchError` on all ranks within 5 s, with ranks and fields
    tests/weights/ranks/test_rank_mismatch.py::test_a_rank_that_differs
    tests/weights/ranks/test_rank_mismatch.py::test_a_replica_that_differs_is_not_averaged_with_the_others
one rank alone calls or forgets `precompute_scales`, or writes to its shard: no rank waits; right numbers, or NaN and a warning on all
    tests/weights/ranks/test_wire.py::test_a_rank_that_forgets_precompute_scales_leaves_nobody_waiting
    tests/weights/ranks/test_wire.py::test_a_weight_that_one_rank_changed_is_reported_and_leaves_nobody_waiting
    tests/faults/ranks/test_alone.py::test_in_the_middle_of_a_run
all ranks forget it; weights loaded, swapped, written to: the next forward uses what the weights are, on all ranks
    tests/weights/ranks/test_wire.py::test_all_reduces_with_and_without_precompute_scales
    tests/contract/ranks/test_weights.py::test_sharded
deepcopy, pickle, flatten: nothing is lost; a copy changes on its own
    tests/convert/test_convert.py::test_a_deep_copy_of_the_model
    tests/weights/test_master_weight.py::test_a_parameter_pickles_as_a_plain_parameter
    tests/tensor/test_float8_tensor.py::test_flatten_and_unflatten
`inference_mode`: the same y, and training goes on
    tests/linear/test_linear.py::test_no_grad_and_inference_mode_give_the_same_y
    tests/linear/test_linear.py::test_training_after_inference_mode
    tests/faults/ranks/test_inputs.py::test_inference_mode_between_and_after_training_steps
a checkpoint read where f8sub is not, or into a bf16 model: plain tensors, bitwise
    tests/weights/ranks/test_checkpoint.py::test_a_process_without_f8sub_reads_a_model
    tests/weights/ranks/test_checkpoint.py::test_a_bf16_checkpoint_into_a_float8_model_and_back
saved by 4 ranks, resumed by 2, 3 and HSDP (2, 2): codes and histories bitwise equal
    tests/faults/ranks/test_elastic.py::test_codes_and_histories_are_those_that_were_saved
kill -9 in the amax all-reduce, in a save in the background: torchrun restarts; losses and checkpoint bitwise the uninterrupted run's
    tests/faults/ranks/test_kill.py::test_the_run_goes_on_from_the_last_whole_checkpoint
ranks that were restarted beside the dead ones' store: they agree among themselves
    tests/faults/ranks/test_restarted.py::test_each_life_agrees_for_itself
a pickle that runs code, in place of a file or signed: refused; no code runs
    tests/recipes/test_pretrain_checkpoint.py::test_a_pickle_in_place_of_a_file_is_not_opened
    tests/recipes/test_pretrain_checkpoint.py::test_even_a_signed_index_runs_no_code
    tests/recipes/test_pretrain_checkpoint.py::test_files_beside_the_listed_ones_are_not_opened
a checkpoint that is truncated, damaged, half written: refused by name on all ranks; the newest whole one is chosen
    tests/recipes/test_pretrain_checkpoint.py::test_a_broken_checkpoint_is_refused_on_all_ranks
    tests/recipes/test_pretrain_checkpoint.py::test_a_save_cut_short_leaves_nothing_that_looks_whole
    tests/faults/ranks/test_corruption.py::test_each_of_600_damages_is_refused_clearly_or_loads_right
a disk that is full on one rank: an error on all ranks; the last whole checkpoint stays
    tests/recipes/test_pretrain_checkpoint.py::test_a_full_disk_is_an_error_on_all_ranks
gradient accumulation, resharding, prefetch, offload, activation checkpointing: losses bitwise those without the float8 all-gather
    tests/weights/ranks/test_fsdp_modes.py::test_on_is_off
tied, shared and frozen weights: cast and gathered once, or skipped with the reason
    tests/convert/test_filters.py::test_lm_head_tied_to_the_embedding_stays
    tests/convert/test_convert.py::test_tied_layers_stay_tied
    tests/linear/test_linear.py::test_one_layer_used_twice
    tests/linear/test_linear_work.py::test_gemms_nobody_needs_are_not_run
meta-device initialization: converted on meta, it trains as one that was not
    tests/convert/test_convert.py::test_meta_device_then_to_empty
a GPU or torch that cannot: another backend, or an error with every candidate's reason
    tests/kernels/test_scaled_mm.py::test_the_gpu_has_to_be_an_ada_or_newer
    tests/kernels/test_scaled_mm.py::test_auto_falls_back_to_the_reference_and_a_named_backend_does_not
"""  # noqa: E501  (a fault and what must happen are one line)
"""Each fault and what must happen; below it the tests."""


def listed() -> dict[str, tuple[str, list[str]]]:
    """Fault -> what must happen, and the tests."""
    found: dict[str, tuple[str, list[str]]] = {}
    tests: list[str] = []
    for line in LISTED.strip().splitlines():
        if line.startswith(" "):
            tests.append(line.strip())
        else:
            fault, _, must = line.partition(": ")
            tests = []
            found[fault] = must, tests
    return found


FAULTS = listed()


def run(tests: list[str], report: Path) -> dict[str, Counter[str]]:
    """Test function -> outcome -> number of its cases."""
    command = [sys.executable, "-m", "pytest", "-q", *tests, f"--junit-xml={report}"]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    found: dict[str, Counter[str]] = {test: Counter() for test in tests}
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name'].partition('[')[0]}"
        found[name][next((kinds[child.tag] for child in case if child.tag in kinds), "passed")] += 1
    return found


def main() -> None:
    made = parser(__doc__, "fault_table")
    made.add_argument("--list", action="store_true", help="name the tests and run none")
    arguments = made.parse_args()
    if arguments.list:
        rows = [[fault, must, ", ".join(tests)] for fault, (must, tests) in FAULTS.items()]
        Table("Faults", ["fault", "what must happen", "tests"], rows).show()
        return
    every_test = sorted({test for _, tests in FAULTS.values() for test in tests})
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(every_test, Path(folder, "report.xml"))
    found = {
        fault: sum((outcomes[test] for test in tests), Counter()) for fault, (_, tests) in FAULTS.items()
    }
    rows = [
        [fault, must, str(found[fault].total()), str(found[fault]["passed"])]
        for fault, (must, _) in FAULTS.items()
    ]
    bad = [fault for fault, cases in found.items() if {kind for kind in cases if cases[kind]} != {"passed"}]
    arguments.write_docs &= not bad
    finish(arguments, found, Table("Faults", ["fault", "what must happen", "cases tried", "so it was"], rows))
    if bad:
        sys.exit(f"not every case went as it must, or there was none: {'; '.join(bad)}")


if __name__ == "__main__":
    main()
