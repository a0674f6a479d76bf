"""The benchmark of many GPUs: what its rows run, on how many, and a section on CPUs."""

import pytest

from scripts.bench import many_gpus
from tests.scripts.test_titan import SHORT, SMALL, of_0_2


@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
def test_rows_take_the_gpus_that_are_there(gpus):
    for section, rows in many_gpus.SECTIONS.items():
        made = list(rows(gpus))
        names = {row.name for row in made}
        assert len(names) == len(made) > 0
        assert {row.base for row in made} == {row.base for row in made if "bf16 " in row.arm} <= names
        assert all(row.gpus <= gpus for row in made)
        assert section == "weak" or {row.gpus for row in made} == {gpus}
    degrees = [option for row in many_gpus.layouts(gpus) for option in row.more if "degree" in option]
    assert len(degrees) == {2: 6, 3: 0, 4: 9, 8: 12}[gpus]
    assert [row.gpus for row in many_gpus.weak(gpus)][-1] == {2: 2, 3: 2, 4: 4, 8: 8}[gpus]


@pytest.mark.long
@of_0_2
def test_a_section_on_cpus(run_script):
    on_cpus = ("--gpus", "2", "--program", "tests.integrations.torchtitan.cpu_0_2")
    ours = ("--only", "bf16", "tensorwise")  # torchao takes no CPU here
    options = ("--sections", "layouts", *ours, *on_cpus, *SMALL, *SHORT, "--compile.no-enable")
    done = run_script("bench/many_gpus.py", *options)
    assert done.returncode == 0
    found = done.figures["figures"]["layouts"]
    assert len(found) == 6
    for name, of in found.items():
        assert of["first_loss"] == pytest.approx(
            found[name.replace("tensorwise", "bf16")]["first_loss"], abs=0.02
        )


@pytest.mark.long
def test_a_rank_that_is_killed(run_script):
    """On CPUs the same ranks' losses are bitwise equal; half of them add in another order."""
    done = run_script(
        "bench/restart.py", "--gpus", "2", "--training.seq_len", "32", "--training.device", "cpu"
    )
    assert done.returncode == 0
    whole, killed, half = done.figures["figures"].values()
    assert whole["gap_percent"] == killed["gap_percent"] == 0 < half["gap_percent"] < 0.1
