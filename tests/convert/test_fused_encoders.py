"""Converted encoders multiply in float8 in evaluation as in training, with padding masks and without."""

import pytest
import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator


def outputs(skip: tuple[str, ...], masked: bool) -> list[torch.Tensor]:
    """Of training and of evaluation; what is masked is zero, or anything."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = f8sub.convert_to_float8(nn.TransformerEncoder(layer, 2), skip=skip)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[1, 5:] = masked
    with torch.no_grad():
        x = gaussian((2, 8, 64), generator(1))
        found = [model.train(mode)(x, src_key_padding_mask=mask) for mode in (True, False)]
    return [y.masked_fill(mask[..., None], 0.0) for y in found]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("skip", [(), ("*.linear2",), ("layers.0",)])
def test_evaluation_is_training_without_gradients(skip, masked):
    """A layer that is left as it was is fused still: its float32 products are added in another order."""
    training, evaluation = outputs(skip, masked)
    tolerance = 0.05 if skip == ("layers.0",) else 0.0
    torch.testing.assert_close(evaluation, training, rtol=0.0, atol=tolerance)
