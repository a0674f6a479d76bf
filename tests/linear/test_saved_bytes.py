"""What a converted layer keeps for backward: the codes of x and their scales, and nothing of the weight."""

from collections.abc import Callable

import torch
from torch import nn

import f8sub
from tests import oracle
from tests.data_sets import gaussian, generator
from tests.layers import RECIPES, on_each_recipe
from tests.models import Stack, seed_weights, shard


class Saved:
    """Storages saved for backward during ``run``, parameters aside, as they are after it."""

    def __init__(self, run: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> None:
        own = {parameter.untyped_storage()._cdata for parameter in parameters}
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            for buffer in inner_tensors(tensor):
                if buffer.untyped_storage()._cdata not in own:
                    saved[buffer.untyped_storage()._cdata] = buffer
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.y = run()
        self._tensors = list(saved.values())

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().size() for tensor in self._tensors)

    def bytes_in(self, *dtypes: torch.dtype) -> int:
        return sum(tensor.untyped_storage().size() for tensor in self._tensors if tensor.dtype in dtypes)


def bytes_of_saved(x: torch.Tensor, recipe: str) -> int:
    """Of what wgrad needs of x: its columnwise codes and their scales, or x itself."""
    if f8sub.get_recipe(recipe).wgrad.b is None:
        return x.nbytes
    spec, shape = oracle.spec_of(recipe, "x"), (x.shape[-1], x.shape[:-1].numel())
    return spec.code_bytes(*shape) + spec.scale_bytes(*shape)


def test_bytes_an_element():
    x = leaf(256, 256)
    found = {name: round(bytes_of_saved(x, name) / x.numel(), 4) for name in RECIPES}
    assert found == {
        "blockwise": 1 + 0.0312,
        "delayed": 1 + 0.0001,
        "gridquant": 1 + 0.0001,
        "mxfp8": 1 + 0.0312,
        "nvfp4": 0.5 + 0.0626,
        "rowwise": 1 + 0.0156,
        "rowwise_with_gw_hp": 4.0,
        "tensorwise": 1 + 0.0001,
    }


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(tensor, f8sub.Float8Tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return gaussian(shape, generator(1)).to(dtype).requires_grad_()


class Projections(nn.Module):
    """Three layers that read one x, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, size, bias=False) for size in (64, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


@on_each_recipe
def test_three_layers_of_one_x_save_it_once(recipe):
    model = f8sub.convert_to_float8(Projections(), recipe=recipe)
    x = leaf(48, 64)
    saved = Saved(lambda: model(x), list(model.parameters()))
    assert saved.bytes == bytes_of_saved(x, recipe)


@on_each_recipe
def test_three_layers_of_different_x_save_each(recipe):
    """The sharing goes by the tensor: equal values in another tensor are another x."""
    model = f8sub.convert_to_float8(Projections(), recipe=recipe)
    x = leaf(48, 64)
    saved = Saved(lambda: model.q(x)[:, :32] + model.k(x.clone()) + model.v(x * 2), list(model.parameters()))
    assert saved.bytes >= 3 * bytes_of_saved(x, recipe)


def _sharded(rank: int, world: int, recipe: str) -> tuple[int, int]:
    model = f8sub.convert_to_float8(seed_weights(Stack(64, 96)), recipe=recipe)
    model = shard(model)
    x = leaf(24, 64)
    f8sub.precompute_scales(model)
    saved = Saved(lambda: model(x), [])
    codes = oracle.TORCH_DTYPES[oracle.spec_of(recipe, "x").format], torch.uint8
    counted = saved.bytes_in(*codes), saved.bytes
    saved.y.backward(gaussian(tuple(saved.y.shape), generator(3)))
    return counted


@on_each_recipe
def test_under_fsdp_all_that_is_left_of_the_weight_after_forward_is_its_shard(ranks, recipe):
    """Unsharded codes that autograd saw are FSDP's to free; the shard in high precision is a parameter."""
    of_x, spec = bytes_of_saved(leaf(24, 64), recipe), oracle.spec_of(recipe, "x")
    for codes, everything in ranks(2, _sharded, recipe):
        assert codes == (0 if f8sub.get_recipe(recipe).wgrad.b is None else spec.code_bytes(64, 24))
        assert everything <= of_x + oracle.spec_of(recipe, "w").scale_bytes(96, 64) + 96 * 64 * 4 // 2
