"""The training loop with its optimizer in one pass: torch's losses, launched and replayed, stopped and resumed."""

import pytest
from f8sub_pretrain.metrics import Metrics

from tests.graphs.tape import imitate
from tests.recipes.runs import losses, quick_settings, trainer
from tests.selection import long_but

STEPS = "--training.gradient_accumulation_steps 2 --training.max_norm 0.5 --lr_scheduler.decay_ratio 0"
FALLS_BACK = "Optimizer: torch's kernels step, because a parameter is on cpu, where f8sub has no kernels"


def trained(rank, world, settings, replayed):
    """What the run said of its optimizer, how its last step was made, and that its optimizer clips by itself."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "say", lambda self, line: said.append(line))
        if replayed:
            imitate(patch)
        made = trainer(world, settings)
        assert made.run()
    how = None if made.graph is None else made.graph.how
    return [line for line in said if line.startswith("Optimizer")], how, made.fused is not None


@pytest.mark.parametrize(
    ("float8", "replayed"), long_but([(True, True)], [(True, True), (True, False), (False, True)])
)
def test_losses_are_those_of_torchs_kernels(ranks, tmp_path, float8, replayed):
    """On a CPU they are the same kernels, which the run says once; clipping is left to the step all the same."""
    options = f"{STEPS} --training.steps 5 --float8.enabled {float8} --compile.cuda_graph {replayed}".lower()
    usual = quick_settings(tmp_path / "torch", f"{options} --optimizer.one_pass false")
    fused = quick_settings(tmp_path / "fused", f"{options} --optimizer.one_pass true")
    how = "replayed" if replayed else None
    assert ranks(2, trained, usual, replayed) == [([], how, False)] * 2
    for said, found, is_fused in ranks(2, trained, fused, replayed):
        assert (found, is_fused) == (how, True)
        assert len(said) == 1
        assert said[0].startswith(FALLS_BACK)
    assert losses(fused) == losses(usual)


@pytest.mark.long
@pytest.mark.parametrize("first", long_but([True], [True, False]))
def test_a_run_resumes_with_the_other(ranks, tmp_path, first):
    whole = quick_settings(tmp_path / "whole", f"{STEPS} --training.steps 4 --optimizer.one_pass false")
    assert ranks(2, trained, whole, False)[0][2] is False
    for steps, one_pass in ((2, first), (4, not first)):
        options = f"--training.steps {steps} --checkpoint.interval 2 --checkpoint.resume newest"
        some = quick_settings(
            tmp_path / "parts", f"{STEPS} {options} --optimizer.one_pass {str(one_pass).lower()}"
        )
        assert ranks(2, trained, some, False)[0][2] is one_pass
    assert losses(some) == losses(whole)
