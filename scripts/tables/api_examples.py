"""The examples of docs/api.md, a function each; the function's name is that of what it shows.

``api.py`` shows what is in a function, with the imports that it uses. Its docstring holds the words of the comment
above the page's block: how many ranks it needs. tests/docs/test_api.py runs all of them.
"""

# Examples name what they make, so that readers see what it is; docstrings are words of Markdown.
# ruff: noqa: F841, RUF059, D415

import torch
from torch import nn

import f8sub

COMMANDS = {
    "titan_Float8ModelConverter": """\
```sh
torchrun --nproc_per_node=8 -m torchtitan.train --job.custom_config_module=f8sub.titan --model.converters=f8sub
```""",
    "titan_JobConfig": """\
```toml
[job]
custom_config_module = "f8sub.titan"
[model]
converters = ["f8sub"]
[f8sub]
recipe_name = "rowwise"
```""",
    "titan_float8": """\
```sh
torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b \\
    --override.imports 'f8sub.titan.float8={"recipe_name": "tensorwise"}' f8sub.titan.precompute_scales
```""",
    "titan_precompute_scales": """\
```sh
torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b \\
    --override.imports f8sub.titan.float8 f8sub.titan.precompute_scales
```""",
    "titan_Float8Transform": """\
```py
from torchtitan.config.transform import apply_transforms
from torchtitan_recipes.models.llama3 import llama3_8b

from f8sub import titan


def llama3_8b_rowwise():  # a recipe, for --module and --config
    return apply_transforms(llama3_8b(), [titan.Float8Transform(recipe_name="rowwise")])
```""",
    "titan_configs": """\
```sh
torchrun --nproc_per_node=8 -m torchtitan.train --module f8sub.titan --config llama3_8b_f8sub
```""",
}
"""What is shown as a command or a file."""


def convert_to_float8():
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
    f8sub.convert_to_float8(model, recipe={"0": "rowwise", "*": "tensorwise"})
    print(model)  # each layer with its recipe and backend


def convert_from_float8():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    f8sub.convert_from_float8(model)
    assert type(model[0]) is nn.Linear


def attend_in_float8():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.o = nn.Linear(256, 768), nn.Linear(256, 256)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 128)).transpose(1, 3).unbind(2)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o(y.transpose(1, 2).flatten(2))

    model = nn.Sequential(Attention(), Attention())
    print(f8sub.attend_in_float8(model))  # ['0', '1']
    y = model(torch.randn(1, 512, 256))  # in high precision: on a CPU, and short
    print(f8sub.conversion_report(model).attention[0].title)


def keep_swiglu_input_in_float8():
    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w3 = (nn.Linear(512, 1024, bias=False) for _ in range(2))
            self.w2 = nn.Linear(1024, 512, bias=False)

        def forward(self, x):
            return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))

    model = f8sub.convert_to_float8(FeedForward())
    print(f8sub.keep_swiglu_input_in_float8(model))  # ['w1', 'w3']
    y = torch.compile(model)(torch.randn(8, 512))


def graph_step():
    model = f8sub.convert_to_float8(nn.Linear(64, 128))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def forward_backward(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    step = f8sub.graph_step(forward_backward, model, optimizer)
    losses = [step(torch.randn(8, 64)) for _ in range(6)]


def GraphedStep():
    model = f8sub.convert_to_float8(nn.Linear(64, 128))
    step = f8sub.graph_step(lambda x: model(x).sum().backward(), model)
    step(torch.randn(8, 64))
    print(step.how, step.why_launched)  # launched there are no graphs on the cpu
    step.close()


def reduce_gradients_in_float8():
    """ranks=2"""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(64, 128), mp_policy=policy)
    print(f8sub.reduce_gradients_in_float8(model))
    model(torch.randn(8, 64)).square().mean().backward()


def dispatch_tokens_in_float8():
    """ranks=2"""
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    experts = nn.Module()
    experts.token_dispatcher = AllToAllTokenDispatcher(AllToAllTokenDispatcher.Config(num_experts=4, top_k=2))
    assert f8sub.dispatch_tokens_in_float8(experts, "rowwise") == 1


def exchange_tokens():
    """ranks=2"""
    x = torch.randn(6, 128).bfloat16().requires_grad_()  # two tokens for rank 0, four for rank 1
    here = [2, 2] if torch.distributed.get_rank() == 0 else [4, 4]
    tokens = f8sub.exchange_tokens(x, here, [2, 4], recipe="rowwise")
    y = f8sub.exchange_tokens(tokens * 2, [2, 4], here, recipe="rowwise", combine=True)
    y.backward(torch.randn(6, 128).bfloat16())


def GradientReduction():
    """ranks=2"""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(64, 128))
    reduction = f8sub.reduce_gradients_in_float8(model, measure=True)
    model(torch.randn(8, 64)).square().mean().backward()
    assert 25 < reduction.decibels()[""] < 40
    reduction.remove()


def register_experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 64, 32))  # four experts

        def forward(self, x, ends):
            return f8sub.grouped_linear(x, self.weight, ends)

    f8sub.register_experts(Experts)
    model = f8sub.convert_to_float8(Experts(), "rowwise", experts=True)
    y = model(torch.randn(10, 32), torch.tensor([3, 3, 8, 10]))


def estimate():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    print(f8sub.estimate(model, tokens=8192))


def Estimate():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096))
    found = f8sub.estimate(model, tokens=8192)
    assert isinstance(found, f8sub.Estimate)


def estimate_step():
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(4))
    print(f8sub.estimate_step(model, gpus=(8, 64), gpu="H200"))


def StepEstimate():
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(4))
    found = f8sub.estimate_step(model, gpus=64)
    print(found.of(64, "+ gradients in e4m3").over_bf16)


def Monitor():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    monitor = f8sub.Monitor(model, every=100)
    with monitor:
        model(torch.randn(8, 64)).square().mean().backward()
    print(monitor.worst(3))


def sensitivity():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    x = torch.randn(8, 64)
    found = f8sub.sensitivity(model, lambda model: model(x).square().mean())
    names = found.skip(0.05)  # for convert_to_float8(skip=...)


def compare():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    batches = [torch.randn(32, 64) for _ in range(3)]
    found = f8sub.compare(
        model, batches, ("tensorwise", "rowwise"), loss_of=lambda model, x: (model(x) - x).square().mean()
    )
    print(found)


def Comparison():
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    found = f8sub.compare(model, [x], "rowwise", loss_of=lambda model, x: model(x).square().mean())
    times = found.loss("rowwise").times_noise  # 1 or less means nothing
    worst = found.worst(4)


def restore_high_precision():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)), primary_weights=True)
    f8sub.drop_high_precision(model.requires_grad_(False))
    f8sub.restore_high_precision(model)
    with torch.no_grad():
        model[0].weight += 0.01  # cast anew


def save_float8():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(256, 256)), recipe="blockwise")
    f8sub.save_float8(model, "served", dtype=torch.bfloat16)


def float8_state_dict():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(256, 256)), recipe="blockwise")
    state, quantization_config = f8sub.float8_state_dict(model, dtype=torch.bfloat16)


def float8_weights():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(256, 256)), recipe="blockwise")
    for name, tensor in f8sub.float8_weights(model, dtype=torch.bfloat16):
        print(name, tensor.dtype, tuple(tensor.shape))


def load_float8():
    trained = f8sub.convert_to_float8(nn.Sequential(nn.Linear(256, 256)), recipe="blockwise")
    f8sub.save_float8(trained, "start", dtype=torch.bfloat16)
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(256, 256)), recipe="blockwise")
    f8sub.load_float8(model, "start")
    f8sub.precompute_scales(model)


def conversion_report():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 10)))
    print(f8sub.conversion_report(model))  # what was converted, and why the rest was not
    print(f8sub.conversion_report(model, batch=torch.randn(8, 512)))  # FLOPs counted in a forward
    print(f8sub.conversion_report(model, tokens=8192).bytes)


def ConversionReport():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 10)))
    report = f8sub.conversion_report(model)
    print(report.summary, report.flops_share)


def LayerReport():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 10)))
    for layer in f8sub.conversion_report(model).layers:
        print(layer.fqn, layer.converted, layer.detail)


def precompute_scales():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    f8sub.precompute_scales(model)  # once, after fully_shard
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)  # after every step


def register_precompute_hook():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    handle = f8sub.register_precompute_hook(optimizer, model)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()  # and precompute_scales(model)
    handle.remove()


def autocast():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    x = torch.randn(8, 64)
    with f8sub.autocast(recipe="rowwise"):
        y = model(x)
        with f8sub.autocast(enabled=False):
            z = model(x)  # in high precision
    (y - z).square().mean().backward()  # as the forwards ran


def checkpoint_policy():
    from torch.utils.checkpoint import checkpoint

    block = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)))
    x = torch.randn(8, 64, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False, context_fn=f8sub.checkpoint_policy("gemms"))
    y.square().mean().backward()


def drop_high_precision():
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    f8sub.convert_to_float8(model, primary_weights=True)
    f8sub.drop_high_precision(model.requires_grad_(False))  # 1 byte an element is left
    y = model(torch.randn(8, 64, dtype=torch.bfloat16))


def skip_step_if_nonfinite():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    guard = f8sub.skip_step_if_nonfinite(optimizer)  # once, on every rank
    model(torch.full((8, 64), torch.inf)).sum().backward()
    optimizer.step()  # changes nothing
    assert int(guard.skipped) == 1


def find_nonfinite():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    with f8sub.find_nonfinite(model) as search:
        model(torch.full((8, 64), torch.inf)).sum().backward()
    print(search)  # x of 0 on rank 0


def prefer_cudnn_attention():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    with f8sub.prefer_cudnn_attention():  # all of a training, and the same for its bf16 run
        q = model(torch.randn(1, 1, 16, 64))
        y = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        y.sum().backward()


def recipe_names():
    for name in f8sub.recipe_names():
        print(f8sub.get_recipe(name))


def get_recipe():
    recipe = f8sub.get_recipe("delayed", amax_history_len=16, margin=1)
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)), recipe=recipe)


def Recipe():
    e4m3 = f8sub.Float8Format(torch.float8_e4m3fn, f8sub.Tile(1, f8sub.ALL), f8sub.ScaleRule.POWER_OF_2)
    spec = f8sub.GemmSpec(a=e4m3, b=e4m3)
    recipe = f8sub.Recipe(name="mine", fprop=spec, dgrad=spec, wgrad=f8sub.GemmSpec(a=None, b=None))
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)), recipe=recipe)
    assert f8sub.get_recipe("tensorwise").with_high_precision(wgrad=True).wgrad.a is None


def GemmSpec():
    e4m3 = f8sub.Float8Format(torch.float8_e4m3fn, f8sub.Tile(f8sub.ALL, f8sub.ALL))
    in_float8 = f8sub.GemmSpec(a=e4m3, b=e4m3, fast_accum=True)
    in_high_precision = f8sub.GemmSpec(a=None, b=None)


def Float8Format():
    vectors = f8sub.Float8Format(torch.float8_e4m3fn, f8sub.Tile(1, 128), f8sub.ScaleRule.POWER_OF_2)
    assert f8sub.Float8Format.parse(vectors.name) == vectors
    assert vectors.max == 448


def Tile():
    assert f8sub.Tile(128, 128).scale_shape((300, 256)) == (
        3,
        2,
    )  # the last tile of a dimension may be smaller
    assert f8sub.Tile(1, f8sub.ALL).t() == f8sub.Tile(f8sub.ALL, 1)


def ALL():
    one_scale_a_row = f8sub.Tile(1, f8sub.ALL)
    one_scale_a_tensor = f8sub.Tile(f8sub.ALL, f8sub.ALL)


def ScaleRule():
    assert f8sub.ScaleRule.E8M0.stored_as == torch.float8_e8m0fnu
    assert f8sub.ScaleRule.POWER_OF_2.is_power_of_2


def Rounding():
    recipe = f8sub.get_recipe("nvfp4", stochastic_rounding=True)
    assert recipe.dgrad.a.rounding is f8sub.Rounding.STOCHASTIC


def grouped_linear():
    x, weight = torch.randn(10, 32), torch.randn(3, 16, 32)  # ten tokens, three experts
    ends = torch.tensor([4, 4, 10])  # four tokens, none, six
    y = f8sub.grouped_linear(x, weight, ends, "rowwise")
    assert y.shape == (10, 16)


def grouped_swiglu():
    x, gate_up, down = torch.randn(10, 32), torch.randn(3, 2 * 16, 32), torch.randn(3, 32, 16)
    ends = torch.tensor([4, 4, 10])  # four tokens, none, six
    y = f8sub.grouped_swiglu(x, gate_up, None, down, ends, "rowwise")
    assert y.shape == (10, 32)


def quantize():
    x = torch.randn(256, 512)
    quantized = f8sub.quantize(x, "blockwise", operand="x")
    print((quantized.dequantize() - x).norm() / x.norm())


def Float8Tensor():
    a = f8sub.quantize(torch.randn(32, 64), "tensorwise")
    b = f8sub.quantize(torch.randn(48, 64), "tensorwise", operand="w")
    y = a @ b.t()  # a float8 GEMM; t() moves no bytes
    assert y.shape == (32, 48)
    a.update_usage(columnwise=False)


def Operand():
    x = f8sub.quantize(torch.randn(256, 512), "rowwise")
    codes, scale_inv, format, _ = x.rowwise
    assert codes.dtype == torch.float8_e4m3fn
    assert scale_inv.shape == (256, 1)


def Float8Linear():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)), recipe="rowwise")
    layer = model[0]
    assert isinstance(layer, f8sub.Float8Linear)
    print(layer)  # its shape, its recipe and what multiplies


def Float8ConfigError():
    try:
        f8sub.get_recipe("fp8")
    except f8sub.Float8ConfigError as error:
        print(error)  # and the names that there are


def Float8ShapeError():
    try:
        f8sub.quantize(torch.randn(4, 8, 16), "rowwise")
    except f8sub.Float8ShapeError as error:
        print(error)


def Float8RankMismatchError():
    """ranks=2"""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64))
    f8sub.convert_to_float8(model, recipe=("tensorwise", "rowwise")[dist.get_rank()])
    fully_shard(model)
    try:
        f8sub.precompute_scales(model)
    except f8sub.Float8RankMismatchError as error:
        print(error)  # the ranks, and the fields in which they differ


def Float8NumericsError():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    model[0].weight.data[0, 0] = torch.nan
    f8sub.precompute_scales(model)
    try:
        f8sub.precompute_scales(model)
    except f8sub.Float8NumericsError as error:
        print(error)


def Float8Warning():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error", f8sub.Float8Warning)
        f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))  # nothing to warn of


def integrations_accelerate_prepare():
    from accelerate import Accelerator

    from f8sub.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = prepare(accelerator, model, optimizer, recipe="tensorwise")


def integrations_lightning_Float8Callback():
    import lightning

    from f8sub.integrations.lightning import Float8Callback

    trainer = lightning.Trainer(accelerator="cpu", logger=False, callbacks=[Float8Callback("tensorwise")])


def integrations_torchao_take_over():
    from torchao import float8

    from f8sub.integrations.torchao import take_over

    taken = take_over()  # prints what it replaced
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    model = float8.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), config=config)
    assert isinstance(model[0], f8sub.Float8Linear)
    taken.give_back()


def integrations_torchao_TakenOver():
    from f8sub.integrations.torchao import TakenOver, take_over

    with take_over() as taken:
        assert isinstance(taken, TakenOver)
        assert "torchao.float8.convert_to_float8_training" in taken.places


def integrations_transformers_attend_causally():
    from transformers import LlamaConfig, LlamaForCausalLM

    from f8sub.integrations.transformers import attend_causally

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128))
    attend_causally(model)
    model(input_ids=torch.arange(16)[None], use_cache=False)


def integrations_transformers_Float8Callback():
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from f8sub.integrations.transformers import Float8Callback

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    arguments = TrainingArguments(report_to="none")
    model = LlamaForCausalLM(config)
    trainer = Trainer(model=model, args=arguments, callbacks=[Float8Callback("tensorwise")])


def integrations_transformers_Float8TrainingConfig():
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from f8sub.integrations.transformers import Float8TrainingConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained("llama")
    float8 = Float8TrainingConfig("tensorwise")
    model = AutoModelForCausalLM.from_pretrained("llama", quantization_config=float8)


def optim_MasterWeights():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)).bfloat16())
    optimizer = f8sub.optim.MasterWeights(torch.optim.AdamW(model.parameters(), lr=3e-4))
    model(torch.randn(8, 64, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()


def optim_fuse_step():
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    fused = f8sub.optim.fuse_step(optimizer)
    for _ in range(2):
        model(torch.randn(8, 64)).square().mean().backward()
        norm = fused.clip_grad_norm_(1.0)
        optimizer.step()
        f8sub.precompute_scales(model)
        optimizer.zero_grad()
    print(norm, fused.why_torch)  # on a CPU torch's own kernels step


def tensor_parallel_Float8ColwiseParallel():
    """ranks=2"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from f8sub.tensor_parallel import Float8ColwiseParallel

    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 128, bias=False)))
    plan = {"0": Float8ColwiseParallel(input_layouts=Shard(1))}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    assert model(torch.randn(2, 16, 64)).shape == (2, 32, 64)  # gathered tokens, half of the features


def tensor_parallel_Float8RowwiseParallel():
    """ranks=2"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from f8sub.tensor_parallel import Float8RowwiseParallel

    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(128, 64, bias=False)))
    plan = {"0": Float8RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    assert model(torch.randn(2, 32, 64)).shape == (
        2,
        16,
        64,
    )  # half of the features in, half of the tokens out


def tensor_parallel_PrepareFloat8ModuleInput():
    """ranks=2"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from f8sub.tensor_parallel import Float8ColwiseParallel, PrepareFloat8ModuleInput

    model = nn.Sequential(nn.Sequential(nn.Linear(64, 128, bias=False)))
    f8sub.convert_to_float8(model)
    gather = PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"0": gather, "0.0": Float8ColwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    assert model(torch.randn(2, 16, 64)).shape == (2, 32, 64)


def titan_Float8Converter():
    from torchtitan.models.llama3 import model_registry

    from f8sub import titan

    converter = titan.Float8Converter.Config(recipe_name="rowwise", filter_fqns=["layers.0."])
    spec = model_registry("8B", converters=[converter])


def titan_with_float8():
    from torchtitan.models.llama3 import model_registry

    from f8sub import titan

    spec = titan.with_float8(model_registry("8B"), recipe_name="tensorwise")


def titan_with_precompute_scales():
    from torchtitan.models.llama3 import model_registry

    from f8sub import titan

    converter = titan.Float8Converter.Config()
    spec = titan.with_precompute_scales(model_registry("8B", converters=[converter]))
