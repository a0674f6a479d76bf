"""graph_step of a decoder of transformers: attend_causally waits for the GPU once, and no step is launched for that."""

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import f8sub
from f8sub.graphs import graph_step
from f8sub.integrations.transformers import attend_causally
from tests.data_sets import generator
from tests.graphs.tape import READS, imitate

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "num_hidden_layers": 1,
}


class _Waits(TorchDispatchMode):
    """Tells what torch's check tells on a GPU: values that the host reads while the check is on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.mode = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.mode and func.name() in READS:
            self.found.append("a line waits for the GPU")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on a CPU, and torch's check for waits."""
    imitate(monkeypatch)
    waits = _Waits()

    @contextlib.contextmanager
    def noticed(device: torch.device) -> Any:
        waits.found = []
        with waits:
            waits.mode = 1
            yield waits.found
            waits.mode = 0

    monkeypatch.setattr(graph_step, "noticed_waits", noticed)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: waits.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(waits, "mode", mode))


@pytest.mark.usefixtures("imitated")
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("first_without", [False, True])
def test_a_decoder_is_captured_though_its_first_forward_waits(recipe, first_without):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="sdpa"))
    f8sub.convert_to_float8(model, recipe, skip_defaults=False, backend="reference")
    attend_causally(model)

    def function(**batch: torch.Tensor) -> torch.Tensor:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss

    step = f8sub.graph_step(
        function,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        warmup=1,
        other_batches="capture",
    )
    ids = torch.randint(64, (2, 16), generator=generator(0))
    hows = []
    for index in range(8):
        batch = {"input_ids": ids, "labels": ids}
        if index > 3 or not first_without:
            batch["position_ids"] = torch.arange(16)[None].expand(2, -1)
        step(**batch)
        hows.append(step.how)
    assert "replayed" in hows[:4]
    assert hows[-1] == "replayed", (hows, step.why_launched)


@pytest.mark.usefixtures("imitated")
def test_what_evaluates_between_steps_changes_no_constant(tmp_path):
    """Generation, evaluation, saving and gradient statistics leave attributes of modules as they were."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="sdpa"))
    f8sub.convert_to_float8(model, "rowwise", skip_defaults=False, backend="reference")
    attend_causally(model)
    # 0 is padding to generate.
    ids = torch.randint(1, 64, (2, 16), generator=generator(0))

    def function(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(input_ids=ids, labels=ids)
            model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.train()
        model.save_pretrained(tmp_path)

    step = f8sub.graph_step(
        function, model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), warmup=2
    )
    for _ in range(4):
        step(ids)
    assert step.how == "replayed"
    for _ in range(2):
        evaluate()
        step(ids)
        assert step.how == "replayed", step.why_launched
