"""attend_in_float8: which modules it changes, what stays as it was, and what becomes of a changed model."""

import copy
import functools
import io
import re
from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.attention import cudnn
from f8sub.attention.ops import attention, attention_backward
from f8sub.attention.state import CHILD, AttentionState
from f8sub.convert.attention import attention_modules
from f8sub.torch_compat import states_follow_parameters
from tests.attention.models import Attention, Block, blocks, gradients, same, tokens
from tests.budgets import decibels
from tests.selection import long_but

in_float8 = functools.partial(f8sub.attend_in_float8, backend="reference", min_length=0)


class Operators(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def state_of(module: nn.Module):
    return getattr(module, CHILD)


@pytest.mark.parametrize("backward", ["float8", "bf16"])
def test_a_model_attends_in_float8(backward):
    model, plain = blocks(), blocks()
    assert in_float8(model, backward=backward) == ["0.attention", "1.attention"]
    x = tokens()
    expected, found = gradients(plain, x), gradients(model, x)
    told = [decibels(a, b) for a, b in zip(expected, found, strict=True)]
    assert all(15 < db < 100 for db in told), told
    assert [type(m).__name__ for m in (model[0], model[0].attention)] == ["Block", "AttentionInFloat8"]
    assert isinstance(model[0].attention, Attention)
    past = state_of(model[0].attention).history
    assert (past[0] > 0).all() == (backward == "float8")


class Masked(Attention):
    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return super().forward(x, attn_mask=mask, is_causal=False)


class WithDropout(Attention):
    def forward(self, x):
        torch.manual_seed(1)
        return super().forward(x, dropout_p=0.5)


class OneRow(Attention):
    """As a step of generation."""

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q[:, :, :4], k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class OfThree(Attention):
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return F.scaled_dot_product_attention(q[..., :16], k[..., :16], v[..., :16])


class InDouble(Attention):
    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2).to(x.dtype))


STAYS = {
    "a mask": (Masked, {}, "a mask"),
    "dropout": (WithDropout, {}, "dropout"),
    "other lengths": (OneRow, {}, "as many rows"),
    "three dimensions": (OfThree, {}, "not (batch, heads, rows, width)"),
    "float64": (InDouble, {}, "q, k and v of torch.float64"),
    "short": (Attention, {"min_length": 25}, "fewer than 25 tokens (min_length=)"),
    "a CPU": (Attention, {"backend": "auto"}, "Hopper"),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_is_not_taken_stays_as_it_was(case):
    cls, options, reason = STAYS[case]
    torch.manual_seed(0)
    model = nn.Sequential(cls())
    if options.get("backend") == "auto":
        model.bfloat16()
    x = tokens().to(model[0].q.weight.dtype)
    expected = gradients_of_output(model, x)
    in_float8(model, **options)
    assert same(gradients_of_output(model, x), expected)
    assert reason in state_of(model[0]).reason
    (told,) = f8sub.conversion_report(model).attention
    assert reason in told.title
    assert reason in str(f8sub.conversion_report(model))


def gradients_of_output(model, x) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_deterministic_algorithms_stay():
    model = nn.Sequential(Attention())
    x = tokens()
    expected = model(x)
    in_float8(model)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(model(x), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic" in state_of(model[0]).reason
    assert not torch.equal(model(x), expected)


def test_heads_that_do_not_fit_are_torchs_error():
    model = nn.Sequential(Attention())
    in_float8(model)
    with pytest.raises(RuntimeError):
        model[0](tokens(), enable_gqa=False)
    assert "do not fit" in state_of(model[0]).reason


def test_the_report():
    model = blocks(3)
    assert [each.title for each in f8sub.conversion_report(model).attention] == 3 * [
        "not in float8: attend_in_float8 has not been called for it"
    ]
    assert "attention" not in f8sub.conversion_report(model).summary
    in_float8(model, skip="2")
    report = f8sub.conversion_report(model)
    # Nobody knows yet what becomes of their calls.
    how = "reference, backward in e4m3"
    never = "1 not: attend_in_float8 has not been called for it"
    assert f"attention: 2 of 3 modules in float8 ({how}, no call seen yet; {never})" in report.summary
    model(tokens())
    assert f"modules in float8 ({how}; {never})" in f8sub.conversion_report(model).summary
    model[0].attention(tokens(), attn_mask=torch.ones(24, 24), is_causal=False)
    told = f"attention: 1 of 3 modules in float8 ({how}; 1 not: the call has a mask; {never})"
    assert told in f8sub.conversion_report(model).summary
    assert f8sub.conversion_report(model.to("meta")).attention[1].title == f"in float8: {how}"
    assert [each.fqn for each in report.attention if each.converted] == ["0.attention", "1.attention"]
    assert "in float8: reference, backward in e4m3" in str(report)
    assert not f8sub.conversion_report(nn.Sequential(nn.Linear(8, 8))).attention


def test_saturations_are_in_the_report():
    model = nn.Sequential(Attention())
    in_float8(model)
    x = tokens()
    for factor in (1.0, 1.0, 64.0):
        (factor * model(x)).square().sum().backward()
    assert state_of(model[0]).saturations == {"dP": 1, "dq": 1, "dk": 1, "dv": 1}
    assert re.search(r"saturated.*dP 1", str(f8sub.conversion_report(model)))


def test_errors():
    for call, words in {
        lambda: f8sub.attend_in_float8(blocks(), backward="fp8"): "backward 'fp8'.*float8, bf16",
        lambda: f8sub.attend_in_float8(blocks(), backend="triton"): "backend 'triton'.*cudnn",
        lambda: f8sub.attend_in_float8(nn.Sequential(nn.Linear(8, 8))): "no module whose code calls",
        lambda: in_float8(blocks(), skip="*"): "no module whose code.*skip= leaves none",
        lambda: f8sub.attend_in_float8(blocks(), backend="cudnn"): "backend='cudnn' runs on NVIDIA's GPUs",
        lambda: f8sub.attend_in_float8([]): "attend_in_float8 takes a model",
    }.items():
        with pytest.raises(f8sub.Float8ConfigError, match=words):
            call()
    with pytest.warns(f8sub.Float8Warning, match="match no attention module"):
        in_float8(blocks(), skip="lm_head")


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(cudnn.importlib.util, "find_spec", lambda name: None)
    cudnn.why_no_package.cache_clear()
    try:
        assert "pip install nvidia-cudnn-frontend==1.23.0" in cudnn.why_no_package()
    finally:
        cudnn.why_no_package.cache_clear()


@pytest.mark.parametrize(
    ("capability", "width", "backward", "reason"),
    [
        ((9, 0), 128, "e4m3", None),
        ((9, 0), 64, "e4m3", "backward='bf16' takes it"),
        ((9, 0), 64, "bf16", None),
        ((9, 0), 72, "bf16", "multiples of 16 up to 256"),
        ((9, 0), 256, "bf16", None),
        ((10, 0), 64, "e4m3", None),
        ((10, 0), 192, "e4m3", "multiples of 16 up to 128"),
    ],
)
def test_head_dims(monkeypatch, capability, width, backward, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = cudnn.why_not_width(width, torch.device("cuda", 0), backward)
    assert found is None if reason is None else reason in found


def test_lengths_that_cudnn_multiplies_wrongly():
    """Measured: dq of 1000 and of 40 rows."""
    assert "no multiple of 128" in cudnn.why_not_lengths(1000, 1024, "e4m3")
    assert "no multiple of 128" in cudnn.why_not_lengths(1024, 1000, "e4m3")
    assert cudnn.why_not_lengths(384, 1024, "e4m3") is None
    assert cudnn.why_not_lengths(1000, 40, "bf16") is None


@pytest.mark.parametrize(
    ("backend", "checkpointed"),
    long_but([("aot_eager", True)], product(["aot_eager", "inductor"], [False, True])),
)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(backend, checkpointed):
    eager, compiled = (blocks() for _ in range(2))
    in_float8(eager)
    in_float8(compiled)

    def call(x):
        for block in compiled:
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return x

    call = torch.compile(call, backend=backend, fullgraph=True)
    for seed in range(3):
        x = tokens(seed=seed)
        expected, found = gradients(eager, x), gradients(compiled, x, call)
        least = 120 if backend == "aot_eager" else 40
        assert all(decibels(a, b) > least for a, b in zip(expected, found, strict=True))
    for a, b in zip(eager, compiled, strict=True):
        a, b = state_of(a.attention), state_of(b.attention)
        assert (a.history > 0).sum() == 12
        torch.testing.assert_close(a.history, b.history, rtol=1e-3, atol=0)
        # A call that is compiled tells nothing.
        assert a.reason is None
        assert b.reason == ""
    # What was trained was in float8, whether or not it told.
    assert "no call seen yet" not in f8sub.conversion_report(compiled).summary


@pytest.mark.parametrize("policy", [None, "bf16", "gemms"])
def test_checkpointed(policy):
    """Bitwise; with a policy attention is not run again."""
    plain, model = blocks(), blocks()
    in_float8(plain)
    in_float8(model)
    options = {} if policy is None else {"context_fn": f8sub.checkpoint_policy(policy)}

    def call(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False, **options)
        return x

    for seed in range(2):
        expected = gradients(plain, tokens(seed=seed))
        with Operators() as seen:
            assert same(gradients(model, tokens(seed=seed), call), expected)
    assert seen.calls[attention] == (4 if policy is None else 2)
    assert seen.calls[attention_backward] == 2


def test_under_autocast():
    model, plain = nn.Sequential(Attention()), nn.Sequential(Attention())
    plain.load_state_dict(model.state_dict())
    in_float8(model)
    x = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = model(x), plain(x)
    assert found.dtype == torch.bfloat16
    assert 18 < decibels(expected, found) < 40


def test_without_gradients():
    model = blocks()
    in_float8(model)
    x = tokens()
    with torch.no_grad():
        y = model.eval()(x)
    assert torch.equal(y, model.train()(x))
    assert not state_of(model[0].attention).history.any()


def test_state_dicts():
    model = blocks()
    in_float8(model)
    for seed in range(2):
        gradients(model, tokens(seed=seed))
    saved = copy.deepcopy(model.state_dict())
    assert [key for key in saved if CHILD in key] == [f"{i}.attention.{CHILD}.history" for i in range(2)]
    resumed = blocks()
    in_float8(resumed)
    resumed.load_state_dict(saved)
    # The first backward of a process runs twice, with the past that was loaded.
    assert same(gradients(resumed, tokens(seed=5)), gradients(model, tokens(seed=5)))
    # Of a model in high precision.
    resumed.load_state_dict(blocks().state_dict())
    plain = blocks()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        plain.load_state_dict(saved)


def test_buffers_stay_float32_and_initialized():
    model = blocks().to("meta")
    in_float8(model)
    model.to_empty(device="cpu").bfloat16()
    state = state_of(model[0].attention)
    assert state.history.dtype == torch.float32
    assert not state.history.any()
    assert not state.saturated.any()


def test_copies_and_pickles():
    model = blocks()
    in_float8(model)
    gradients(model, tokens())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    x = tokens(seed=3)
    expected = gradients(model, x)
    for each in copies:
        assert type(each[0].attention) is type(model[0].attention)
        assert same(gradients(each, x), expected)


@pytest.mark.parametrize(("backward", "has_past"), [("float8", True), ("float8", False), ("bf16", False)])
def test_a_model_on_meta_attends_on_a_state_dict_that_is_assigned(backward, has_past):
    """What counts saturations is in no state dict, and a history in none of attention in high precision."""
    trained = blocks()
    in_float8(trained, backward=backward)
    gradients(trained, tokens())
    kept = {name: value for name, value in trained.state_dict().items() if has_past or CHILD not in name}
    with torch.device("meta"):
        model = blocks()
    in_float8(model, backward=backward)
    expected = blocks()
    in_float8(expected, backward=backward)
    expected.load_state_dict(kept, strict=False)
    model.load_state_dict({n: v.clone() for n, v in kept.items()}, assign=True, strict=False)
    for seed in range(2):
        assert same(gradients(model, tokens(seed=seed)), gradients(expected, tokens(seed=seed)))
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert state_of(model[0].attention).history.any() == (backward == "float8")


def _loaded_whole(model: nn.Module, values: dict[str, torch.Tensor], tmp_path) -> None:
    model.load_state_dict(values, assign=True)


def _loaded_by_block(model: nn.Module, values: dict[str, torch.Tensor], tmp_path) -> None:
    for name, block in model.named_children():
        of_block = {
            key.removeprefix(f"{name}."): v for key, v in values.items() if key.startswith(f"{name}.")
        }
        block.load_state_dict(of_block, assign=True)


def _loaded_as_float8(model: nn.Module, values: dict[str, torch.Tensor], tmp_path) -> None:
    if not (folder := tmp_path / "float8").exists():
        source = f8sub.convert_to_float8(blocks(1), "rowwise", min_dim=0)
        source.load_state_dict(values)
        f8sub.precompute_scales(source)
        f8sub.save_float8(source, folder, dtype=torch.float32, config={})
    f8sub.load_float8(model, folder, device="cpu")


@pytest.mark.parametrize("load", [_loaded_whole, _loaded_by_block, _loaded_as_float8])
@pytest.mark.usefixtures("fresh_compiler")
def test_blocks_that_are_compiled_on_meta_attend_once_they_are_loaded(load, tmp_path):
    """No state dict has a history of attention in high precision, and compiled code cannot move one."""
    values = blocks(1).state_dict()
    with torch.device("meta"):
        model = f8sub.convert_to_float8(blocks(1), "rowwise", min_dim=0)
    expected = f8sub.convert_to_float8(blocks(1), "rowwise", min_dim=0)
    for each in (model, expected):
        in_float8(each)
    for block in model:
        block.compile(backend="eager", fullgraph=True)
    load(model, {name: value.clone() for name, value in values.items()}, tmp_path)
    load(expected, values, tmp_path)
    assert not any(buffer.is_meta for buffer in model.buffers())
    for seed in range(2):
        assert same(gradients(model, tokens(seed=seed)), gradients(expected, tokens(seed=seed)))
    assert (state_of(model[0].attention).history[:2] > 0).all()


def test_histories_leave_meta_for_the_device_that_gathers_offloaded_shards(monkeypatch):
    """Shards of ``CPUOffloadPolicy`` lie on the CPU, and attention runs on the GPU of their mesh."""
    with torch.device("meta"):
        model = nn.Sequential(Attention())
    in_float8(model)
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    for layer in model[0].children():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            local = torch.empty(parameter.shape)
            spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(local.shape, local.stride(), local.dtype))
            layer._parameters[name] = nn.Parameter(DTensor(local, spec, requires_grad=False))
    asked = []
    # Without a GPU no tensor can lie there.
    monkeypatch.setattr(AttentionState, "come_to", lambda state, device: asked.append(device.type))
    states_follow_parameters(model)
    assert set(asked) == {"cuda"}


def test_attention_that_is_the_whole_model_leaves_meta_when_it_is_loaded():
    values = Attention().state_dict()
    with torch.device("meta"):
        model = Attention()
    for _ in range(2):
        in_float8(model)
    assert len(model._load_state_dict_post_hooks) == 1
    model.load_state_dict(values, assign=True)
    assert {buffer.device.type for buffer in state_of(model).buffers()} == {"cpu"}


def test_with_float8_layers_and_back():
    model, plain = blocks(), blocks()
    f8sub.convert_to_float8(model, min_dim=0)
    in_float8(model)
    # Called again, it changes options.
    in_float8(model, backward="bf16")
    assert state_of(model[0].attention).backward == "bf16"
    gradients(model, tokens())
    f8sub.convert_from_float8(model)
    assert type(model[0].attention) is Attention
    assert same(gradients(model, tokens()), gradients(plain, tokens()))
    assert [each.state for each in attention_modules(model)] == [None, None]


def test_a_whole_block_may_call_it():
    """A module whose own code calls attention, with layers in it."""

    class Whole(Block):
        def forward(self, x):
            q = self.norm(x).unflatten(-1, (2, 16)).transpose(1, 2)
            return self.mlp(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))

    model = nn.Sequential(Whole())
    expected = model(tokens())
    assert in_float8(model) == ["0", "0.attention"]
    assert 18 < decibels(expected, model(tokens())) < 60
    assert state_of(model[0]).reason is None
    assert state_of(model[0].attention).reason == ""


def test_a_monitor_has_a_row_of_each():
    model, plain = blocks(), blocks()
    for each in (model, plain):
        f8sub.convert_to_float8(each, min_dim=0)
        in_float8(each, skip="1")
    monitor = f8sub.Monitor(model, every=2)
    for seed in range(3):
        with monitor:
            found = gradients(model, tokens(seed=seed))
        assert same(found, gradients(plain, tokens(seed=seed)))
    monitor.flush()
    rows = [row for row in monitor.rows if row.role == "attention"]
    assert [(row.step, row.layer) for row in rows] == [(0, "0.attention"), (2, "0.attention")]
    assert all(20 < row.sqnr < 30 for row in rows)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_monitor_of_attention_alone(compiled):
    """No layer was converted."""
    model, plain = blocks(), blocks()
    for each in (model, plain):
        in_float8(each)
    call = torch.compile(model, backend="eager") if compiled else model
    told = []
    monitor = f8sub.Monitor(model, every=2, to=lambda step, rows: told.extend(rows))
    for seed in range(3):
        with monitor:
            found = gradients(model, tokens(seed=seed), call)
        assert same(found, gradients(plain, tokens(seed=seed)))
    monitor.flush()
    assert told == monitor.rows
    assert [(row.step, row.layer) for row in told] == [
        (step, f"{i}.attention") for step in (0, 2) for i in range(2)
    ]
    head, *lines = monitor.worst().splitlines()
    assert head.startswith("attention ")
    assert len(lines) == 2
    with pytest.raises(f8sub.Float8ConfigError, match="no float8 layer"):
        f8sub.Monitor(model, layers="mlp")


def test_a_monitors_table_has_attention_and_what_saturated():
    model = blocks(3)
    f8sub.convert_to_float8(model, min_dim=0)
    in_float8(model)
    state_of(model[2].attention).min_length = 99
    monitor = f8sub.Monitor(model, every=1, layers=["0", "1.attention", "2.attention"])
    for factor in (1.0, 1.0, 64.0):
        with monitor:
            (factor * model(tokens())).square().sum().backward()
    *operands, head, none, first, second = monitor.worst(4).splitlines()
    assert operands[0].startswith("layer ")
    assert len(operands) == 5
    assert head.split() == ["attention", "dB", "of", "o"]
    assert re.search(r"^2\.attention +nan  not in float8: sequences of fewer than 99", none)
    found = {
        name: (float(db), rest) for name, db, rest in (line.split(maxsplit=2) for line in (first, second))
    }
    assert found.keys() == {"0.attention", "1.attention"}
    assert all(20 < db < 30 for db, _ in found.values())
    assert all(
        "reference, backward in e4m3; backwards that saturated: dP 1" in rest for _, rest in found.values()
    )
