"""Everything here needs a CUDA device with float8 tensor cores, and says so where there is none."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
OLDEST = (8, 9)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if torch.cuda.device_count() == 0:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def float8_tensor_cores() -> None:
    """Not asked at collection: the answer starts CUDA, which ranks cannot be forked after."""
    if torch.cuda.get_device_capability() < OLDEST:
        pytest.skip(f"needs a CUDA device of SM {OLDEST[0]}.{OLDEST[1]} or newer")
