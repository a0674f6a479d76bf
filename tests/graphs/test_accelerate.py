"""graph_step with what accelerate prepared: replays are launched steps."""

import pytest
import torch

import f8sub
from tests.graphs.tape import imitate
from tests.graphs.test_graph_step import STEPS, adamw, batch_of
from tests.models import transformer

accelerate = pytest.importorskip("accelerate")


def trained() -> tuple[list[float], f8sub.GraphedStep]:
    accelerator = accelerate.Accelerator(cpu=True)
    model = transformer("rowwise", spread=2.0)
    model, optimizer = accelerator.prepare(model, adamw(model))

    def forward_backward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    step = f8sub.graph_step(forward_backward, model, optimizer)
    return [step(*batch_of(index)).item() for index in range(STEPS)], step


def test_with_a_prepared_model_and_optimizer(monkeypatch):
    launched, _ = trained()
    imitate(monkeypatch)
    replayed, step = trained()
    assert replayed == launched
    assert (step.how, step.why_optimizer_launched) == ("replayed", None)
