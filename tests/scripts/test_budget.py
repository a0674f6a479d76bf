"""The account of a traced step: what each kernel is for, what runs beside communication, and where nothing does."""

import pytest

from scripts.bench import budget


def kernel(name: str, begin: float, length: float, number: int) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": length, "args": {"correlation": number}}


def launch(begin: float, number: int) -> dict[str, object]:
    return {"cat": "cuda_runtime", "name": "launch", "ts": begin, "args": {"correlation": number}}


def test_an_account_of_a_step():
    """A GEMM, a gather that it hides by half, nothing for 300 us, an attention that was launched late; the optimizer.

    What lies before the end of the optimizer step before, and after this one's, is of other steps.
    """
    found = budget.account(
        [
            kernel("flash_fwd", -1000.0, 500.0, 0),
            kernel("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", 0.0, 100.0, 0),
            kernel("nvjet_qqtst", 100.0, 400.0, 1),
            kernel("ncclDevKernel_AllGather", 300.0, 400.0, 2),
            kernel("flash_fwd", 1000.0, 29000.0, 3),
            kernel("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", 30000.0, 600.0, 4),
            kernel("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", 30600.0, 400.0, 5),
            kernel("nvjet_qqtst", 31000.0, 400.0, 6),
            launch(0.0, 1),
            launch(0.0, 2),
            launch(990.0, 3),
            launch(1000.0, 4),
        ]
    )
    assert found["step_ms"] == pytest.approx(30.9)
    kinds = {"GEMM": 0.4, "communication": 0.4, "attention": 29.0, "optimizer and gradient norm": 1.0}
    assert found["ms"] == pytest.approx(kinds)
    assert found["alone_ms"] == pytest.approx(0.2)
    assert found["idle_ms"] == pytest.approx(0.3)
    assert found["gaps_ms"] == pytest.approx([0.5])
    assert found["late_share"] == pytest.approx(1 / 4)


def test_a_trace_of_less_than_a_step_is_no_account():
    with pytest.raises(ValueError, match="no two optimizer steps"):
        budget.account([kernel("nvjet_qqtst", 100.0, 400.0, 1)])


def test_gaps_below_the_limit_do_not_count():
    assert budget.gaps([(0.0, 10.0), (159.0, 200.0), (350.0, 360.0)]) == [150.0]
