"""What importing f8sub brings in, and what it gives."""

import json
import subprocess
import sys

import pytest

import f8sub

SLOW = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor", "sympy"]
"""Modules of torch, and one that these bring in, that a float8 model may never need."""

OPTIONAL = ["triton", "torchao", "transformers", "torchtitan", "safetensors", "pyarrow", "matplotlib", "rich"]


def in_a_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


IMPORT = """
import json, sys
import torch, torch.optim.optimizer as o
modules = set(sys.modules)
state = lambda: [str(torch.get_default_dtype()), torch.get_num_threads(), len(o._global_optimizer_pre_hooks)]
before = state()
import f8sub
print(json.dumps([list(set(sys.modules) - modules), before, state()]))
"""


@pytest.fixture(scope="module")
def imported() -> tuple[list[str], list[object], list[object]]:
    """Modules that f8sub imports and torch does not; what torch's state was before, and is behind."""
    return json.loads(in_a_fresh_process(IMPORT))


def test_importing_f8sub_imports_torch_and_the_standard_library_alone(imported):
    tops = {name.partition(".")[0] for name in imported[0]}
    assert {"f8sub"} < tops <= {"f8sub", "torch", *sys.stdlib_module_names}


def test_importing_f8sub_loads_little_besides_and_nothing_slow(imported):
    others = {name for name in imported[0] if name.partition(".")[0] != "f8sub"}
    assert not {name for name in others for slow in [*SLOW, *OPTIONAL] if f"{name}.".startswith(f"{slow}.")}
    assert len(others) < 10


def test_fsdp2_and_tensor_parallelism_may_be_imported_after_f8sub():
    """By then sockets and hooks are there: weights are gathered as float8, and refused where they are sharded."""
    code = """
import torch, f8sub
import torch.distributed as dist
model = torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 16, bias=False))
f8sub.convert_to_float8(model)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fully_shard(model[0])
gathered = []
model[0].register_forward_pre_hook(lambda layer, args: gathered.append(type(layer.weight).__name__))
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
parallelize_module(model[1], mesh, f8sub.tensor_parallel.Float8ColwiseParallel())
x = torch.randn(8, 16)
model(x).backward(torch.randn(8, 16))
print(*gathered, type(model[0].weight.grad).__name__, type(model[1].weight.grad).__name__)
try:
    f8sub.convert_from_float8(model)
except f8sub.Float8ConfigError as error:
    print("already sharded" in str(error))
"""
    assert in_a_fresh_process(code).split() == ["Float8Tensor", "DTensor", "DTensor", "True"]


def test_it_works_where_nothing_optional_can_be_imported():
    code = f"""
import sys
for name in {[name for name in OPTIONAL if name != "triton"]}:
    sys.modules[name] = None
import torch, f8sub
model = f8sub.convert_to_float8(torch.nn.Sequential(torch.nn.Linear(16, 32)))
x = torch.randn(8, 16, requires_grad=True)
model(x).backward(torch.randn(8, 32))
print(x.grad.isfinite().all().item())
"""
    assert in_a_fresh_process(code).strip() == "True"


def test_importing_changes_nothing_of_torch(imported):
    """No default dtype, no thread count, no optimizer hook: those come with the first conversion."""
    _, before, after = imported
    assert before == after


def test_all_is_complete():
    names = {name for name, value in vars(f8sub).items() if not isinstance(value, type(sys))}
    assert set(f8sub.__all__) == {name for name in names if not name.startswith("_")}
    assert f8sub.__all__ == sorted(f8sub.__all__)
