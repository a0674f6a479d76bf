"""Every public call that takes a model or an optimizer refuses everything else by one error of its own."""

import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import f8sub
import f8sub.optim

LINEAR = nn.Linear(4, 4)

OTHERS: dict[str, Callable[[], Any]] = {
    "a dict": dict,
    "a state dict": LINEAR.state_dict,
    "None": lambda: None,
    "a string": lambda: "no/such/model",
    "a list of strings": lambda: ["model"],
    "an empty list": list,
    "an iterator that was read": lambda: iter(()),
    "a class": lambda: nn.Linear,
    "an optimizer": lambda: torch.optim.SGD(LINEAR.parameters(), lr=0.1),
    "a tensor": lambda: torch.ones(2),
    "a number": lambda: 3,
    "a function": lambda: lambda: None,
}

FOLDER = Path("no such folder")

OF_A_MODEL: dict[str, Callable[[Any], Any]] = {
    "Monitor": lambda model: f8sub.Monitor(model, every=1),
    "attend_in_float8": f8sub.attend_in_float8,
    "compare": lambda model: f8sub.compare(model, [torch.ones(2, 4)]),
    "conversion_report": f8sub.conversion_report,
    "convert_from_float8": f8sub.convert_from_float8,
    "convert_to_float8": f8sub.convert_to_float8,
    "dispatch_tokens_in_float8": lambda model: f8sub.dispatch_tokens_in_float8(model, "rowwise"),
    "drop_high_precision": f8sub.drop_high_precision,
    "estimate": f8sub.estimate,
    "estimate_step": f8sub.estimate_step,
    "find_nonfinite": lambda model: f8sub.find_nonfinite(model).__enter__(),
    "float8_state_dict": f8sub.float8_state_dict,
    "float8_weights": lambda model: list(f8sub.float8_weights(model)),
    "graph_step": lambda model: f8sub.graph_step(lambda: None, model),
    "keep_swiglu_input_in_float8": f8sub.keep_swiglu_input_in_float8,
    "load_float8": lambda model: f8sub.load_float8(model, FOLDER),
    "precompute_scales": f8sub.precompute_scales,
    "reduce_gradients_in_float8": f8sub.reduce_gradients_in_float8,
    "register_precompute_hook": lambda model: f8sub.register_precompute_hook(OTHERS["an optimizer"](), model),
    "restore_high_precision": f8sub.restore_high_precision,
    "save_float8": lambda model: f8sub.save_float8(model, FOLDER),
    "sensitivity": lambda model: f8sub.sensitivity(model, lambda model: model(torch.ones(2, 4)).sum()),
}


def hook(optimizer: Any) -> None:
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)), skip_defaults=False)
    f8sub.register_precompute_hook(optimizer, model)


OF_AN_OPTIMIZER: dict[str, Callable[[Any], Any]] = {
    "optim.MasterWeights": f8sub.optim.MasterWeights,
    "register_precompute_hook": hook,
    "skip_step_if_nonfinite": f8sub.skip_step_if_nonfinite,
}


EMPTY = ("an empty list", "an iterator that was read")
"""Parts of a model that ``precompute_scales`` takes: there is nothing to compute."""


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("call", OF_A_MODEL)
def test_what_is_no_model_is_refused(call, other):
    if call == "precompute_scales" and other in EMPTY:
        f8sub.precompute_scales(OTHERS[other]())
        return
    with pytest.raises(f8sub.Float8ConfigError) as error:
        OF_A_MODEL[call](OTHERS[other]())
    assert 20 < len(str(error.value)) < 400


@pytest.mark.parametrize("other", OTHERS.keys() - {"an optimizer"})
@pytest.mark.parametrize("call", OF_AN_OPTIMIZER)
def test_what_is_no_optimizer_is_refused(call, other):
    with pytest.raises(f8sub.Float8ConfigError, match="optimizer"):
        OF_AN_OPTIMIZER[call](OTHERS[other]())


def test_every_public_call_is_here():
    made_by_f8sub = {"GraphedStep", "GradientReduction"}
    taking = {"model": set(), "optimizer": set()}
    for name in f8sub.__all__:
        each = getattr(f8sub, name)
        is_call = inspect.isfunction(each) or (
            isinstance(each, type) and not issubclass(each, Exception | Enum)
        )
        if is_call and name not in made_by_f8sub:
            for parameter in taking.keys() & inspect.signature(each).parameters.keys():
                taking[parameter].add(name)
    assert taking["model"] == OF_A_MODEL.keys()
    # The optimizer of ``compare`` is a function, that of ``graph_step`` may be None.
    assert taking["optimizer"] - {"compare", "graph_step"} == OF_AN_OPTIMIZER.keys() - {"optim.MasterWeights"}
