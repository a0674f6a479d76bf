"""A step on many GPUs: what was measured and published is within the errors that the page tells; collectives and
timelines by hand; the command; what is refused."""

import json
import re

import pytest
import torch
from torch import nn

import f8sub
from f8sub.__main__ import main
from f8sub.estimator import page
from f8sub.estimator.cluster import (
    BF16,
    CODE,
    E4M3,
    FLOAT32,
    NETWORK,
    STEP,
    Arm,
    Cluster,
    Group,
    divided,
    reduction_of,
    timeline,
)
from f8sub.estimator.estimate import GATHERS, shapes_of
from f8sub.estimator.gpus import H200
from f8sub.estimator.models import load
from tests.estimator.runs import rates, speed_ups, whole_runs
from tests.models import Transformer

TOLD = {"whole runs": page.WHOLE_RUNS, "speed-ups": page.SPEED_UPS, "rates": page.RATES}


@pytest.mark.parametrize(
    ("name", "errors", "count"),
    [("whole runs", whole_runs, 23), ("speed-ups", speed_ups, 7), ("rates", rates, 5)],
)
def test_errors_are_those_that_the_page_tells(name, errors, count):
    """Runs that the host limits are aside, which this model does not know: of 1B, of 2048 tokens, of TP 2 with 8192."""
    found = errors()
    assert len(found) == count
    largest = max(found, key=lambda run: abs(found[run]))
    assert TOLD[name] - 0.01 <= abs(found[largest]) <= TOLD[name], f"{largest}: {found[largest]:+.1%}"


def test_a_ring_takes_the_slower_of_nvlink_and_nics():
    size, one, several = 8e9, Cluster(H200, 8), Cluster(H200, 64)
    assert one.ring(size) == pytest.approx(size * 7 / 8 / one.link + 7 * STEP)
    assert one.nic == 50e9 * NETWORK
    assert several.ring(size) == pytest.approx(size * 63 / 64 / 8 / several.nic, rel=0.02)
    fast = Cluster(H200, 64, network=1e15)
    assert fast.ring(size) == pytest.approx(size * 63 / 64 / fast.link, rel=0.02)
    halves = Cluster(H200, 64, replicas=8)
    assert (halves.shards, halves.neighbours, halves.hosts) == (8, 8, 1)
    parts = Cluster(H200, 64, parts=4)
    assert (parts.shards, parts.neighbours, parts.hosts) == (16, 2, 8)


def test_an_exchange_sends_its_bytes():
    """A byte a gradient in a host; over hosts bfloat16 there, then codes of its sums; eight times those if flat."""
    elements, one, several = 1e10, Cluster(H200, 8), Cluster(H200, 64)
    assert one.exchange(elements, flat=False) == pytest.approx(elements * CODE * 7 / 8 / one.link, rel=0.01)
    within = elements * 2 * 7 / 8 / several.link
    across = elements / 8 * CODE * 7 / 8 / several.nic
    assert several.exchange(elements, flat=False) == pytest.approx(within + across, rel=0.01)
    assert several.exchange(elements, flat=True) == pytest.approx(8 * across, rel=0.01)
    bf16_ring = several.ring(2 * elements)
    assert several.exchange(elements, flat=True) > 3 * bf16_ring
    seconds = [reduction_of(elements, Arm(reduction=how), one)[0] for how in (FLOAT32, BF16, E4M3)]
    assert seconds[0] > seconds[1] > seconds[2]


def test_an_all_reduce_over_replicas_takes_the_network_between_hosts():
    assert Cluster(H200, 8).all_reduce(1e9) == 0
    within, between = Cluster(H200, 8, replicas=2), Cluster(H200, 16, replicas=2)
    assert within.all_reduce(1e9) == pytest.approx(1e9 / within.link, rel=0.02)
    assert between.all_reduce(1e9) == pytest.approx(1e9 / between.nic, rel=0.02)


def group(forward: float, gather: float, reduce: float, tax: float = 0.0, replicate: float = 0.0) -> Group:
    return Group(forward, 2 * forward, gather, reduce, replicate, tax, tax)


NOTHING = group(0.0, 0.0, 0.0)


def test_collectives_shorter_than_compute_show_at_the_ends_alone():
    """Each pass's first gather and the last reduction; three blocks of 1 and 2 seconds."""
    found = timeline([group(1.0, 0.25, 0.5)] * 3, NOTHING)
    assert found.forward == 3.25
    assert found.forward + found.backward == 9 + 0.25 + 0.25 + 0.5
    assert (found.compute, found.waiting, found.tax) == (9, 1.0, 0)
    beside = timeline([group(1.0, 0.25, 0.5)] * 3, group(0.5, 0.0, 0.0))
    assert (beside.compute, beside.waiting) == (10.5, 0.75)


def test_collectives_longer_than_compute_queue():
    """Forward is its gathers; in backward a gather waits for the reduction that was asked for before it."""
    found = timeline([group(1.0, 4.0, 3.0)] * 3, NOTHING)
    assert found.forward == 3 * 4 + 1
    # the last block's gather, the one before; then reductions and gathers in turn, and two reductions at the end
    assert found.backward == 4 + 4 + (3 + 4) + 3 + 3
    assert found.waiting == found.forward + found.backward - 9


def test_what_is_hidden_slows_compute():
    """By its whole tax where compute hides all of it, else by the part that is hidden."""
    blocks = [group(1.0, 0.25, 0.5, tax=0.1)] * 3
    assert timeline(blocks, NOTHING).tax == pytest.approx(0.1 * (2 + 2 + 2))
    partly = [group(1.0, 2.0, 0.0, tax=0.1), group(1.0, 2.0, 0.0, tax=0.1)]
    assert timeline(partly, NOTHING).tax == pytest.approx(1 / 19 + 0.1 + 0.1)


def test_replicas_are_reduced_behind_shards():
    found = timeline([group(1.0, 0.0, 0.5, replicate=5.0)] * 2, NOTHING)
    assert found.forward + found.backward == 2 + 2 + 0.5 + 5 + 5


def test_tensor_parallelism_divides_the_weights():
    """Rows of what reads a norm, columns of what is summed up; all of the elements."""
    whole = shapes_of(load("llama3-8b"))
    part = divided(whole, 4)
    shapes = {p.fqn.rpartition(".")[2]: (p.rows, p.cols) for p in part.products}
    assert shapes["q_proj"] == (1024, 4096)
    assert shapes["o_proj"] == (4096, 1024)
    assert shapes["down_proj"] == (4096, 3584)
    assert part.parameters == pytest.approx(whole.parameters / 4, rel=1e-6)


def test_llamas_by_size():
    assert shapes_of(load("llama3-8b")).parameters == 8_030_261_248
    assert shapes_of(load("llama3-70b")).parameters == 70_553_706_496


def test_a_page_fits_80_columns(capsys):
    assert main(["estimate", "llama3-8b", "--gpus", "8", "64", "128", "1024", "--gpu", "H100"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]
    assert "8.03B parameters, 32 blocks, on H100s, 8 per host" in " ".join(text.split())
    assert "+ gradients in e4m3" in text
    assert "within 7% (those of the 8B with --gpu H100-500W" in " ".join(text.split())
    assert main(["estimate", "llama3-70b", "--gpus", "8", "--checkpoint", "none"]) == 0
    assert "x: more than a GPU's memory" in capsys.readouterr().out
    assert main(["estimate", "llama3-8b", "--gpus", "8", "--recipe", "mxfp8"]) == 0
    text = capsys.readouterr().out
    assert "mxfp8 has no native kernels on H100" in text
    assert "h: a host" not in text


def test_a_step_that_a_host_launches_no_faster_is_marked(capsys):
    assert main(["estimate", "llama3-8b", "--gpus", "8", "--tokens", "2048"]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert "launching a step takes it 298 ms in bf16 and 404 ms in tensorwise." in words
    assert "was measured 0.73 to 0.78 times as fast as bf16 in three runs" in words
    assert "Replay the step by f8sub.graph_step, or give a GPU more tokens." in words
    marked = [line for line in text.splitlines() if line.endswith("h")]
    assert [line[2:9] for line in marked] == ["float8 ", "+ float", "+ one a", "  gradi", "+ gradi"]
    assert max(map(len, text.splitlines())) <= 80
    assert main(["estimate", "llama3-8b", "--gpus", "8"]) == 0
    assert "graph_step" not in capsys.readouterr().out


def test_a_page_says_how_gpus_share_the_model(capsys):
    command = "estimate llama3-8b --gpu H200 --gpus 16 --replicas 2 --tensor-parallel 2 --tokens 1024"
    assert main(command.split()) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "2 copies of the weights (HSDP), 2 share each layer (tensor parallelism). 1,024 tokens" in words
    assert "Give a GPU more tokens." in words
    # graph_step takes no tensor parallelism.
    assert "graph_step" not in words


def test_json_has_every_way(capsys):
    command = "estimate llama3-8b --gpus 16 --replicas 2 --recipe mxfp8 --reduction bf16 --network 200 --json"
    assert main(command.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["replicas"], found["network_gbit"]) == (8_030_261_248, 2, 200)
    # scales of blocks in rows cross no ranks
    assert [row["way"] for row in found["predictions"]] == [
        "bf16",
        "float8 compute",
        "+ float8 all-gather",
        "+ gradients in e4m3",
    ]
    row = found["predictions"][-1]
    parts = row["timeline"]["forward"] + row["timeline"]["backward"] + row["loss"] + row["optimizer"]
    assert row["seconds"] == pytest.approx(parts)
    assert row["tokens_per_second"] == pytest.approx(8192 / row["seconds"])


def test_a_step_of_few_tokens_gains_more_by_bytes():
    """Gradients in e4m3 add more where a GPU has fewer tokens; a flat exchange over hosts takes it away."""

    def gain(tokens: int, gpus: int) -> float:
        found = f8sub.estimate_step(load("llama3-8b"), gpus, tokens=tokens)
        one, last = (found.of(gpus, way).replayed_seconds for way in found.ways[-3::2])
        return one / last

    assert gain(2048, 8) > gain(8192, 8) > 1
    flat = f8sub.estimate_step(load("llama3-8b"), 64, reduction="e4m3-flat", tokens=2048)
    last, before = (flat.of(64, way).replayed_seconds for way in (flat.ways[-1], flat.ways[-2]))
    assert last < 0.8 * before


def test_one_shard_sends_nothing():
    """f8sub leaves modules of one rank as they are."""
    found = f8sub.estimate_step(load("llama3-8b"), 1)
    assert found.of(1, "+ gradients in e4m3").seconds == found.of(1, "+ one all-reduce of all scales").seconds
    assert found.of(1, "bf16").timeline.waiting == pytest.approx(0, abs=1e-9)
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"with gpus=8, way='bf16'; it has gpus of 1; way of 'bf16', "
    ):
        found.of(8, "bf16")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gpu": "L40S"}, "unknown GPU 'L40S'; choose one of H200, H100"),
        ({"gpu": "mi300x"}, "MI300X gains nothing by f8sub: it multiplies e4m3fnuz"),
        ({"reduction": "fp4"}, "unknown reduction 'fp4'"),
        ({"reduction": "e4m3, flat"}, r"unknown reduction 'e4m3, flat' \(nearest: e4m3-flat, e4m3\)"),
        ({"checkpoint": "some"}, "unknown checkpoint policy 'some'"),
        ({"gpus": ()}, "one number of GPUs or more"),
        ({"gpus": 0}, r"gpus \(--gpus\) is a whole number from 1 on, got 0"),
        ({"gpus": 12}, "12 GPUs on hosts of 8 do not divide"),
        ({"gpus": 16, "replicas": 3}, "into replicas=3"),
        ({"tensor_parallel": 16, "gpus": 16}, "tensor_parallel=16"),
        ({"network": 0}, r"network \(--network\) is more than 0 Gbit/s, got 0"),
        ({"tokens": 4, "sequence": 8}, "tokens that hold a sequence"),
    ],
)
def test_what_is_refused(options, told):
    with torch.device("meta"):
        model = Transformer(1024, 2048)
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.estimate_step(model, options.pop("gpus", 8), **options)


def test_numbers_of_small_models_stay_apart_from_names():
    text = str(f8sub.estimate_step(Transformer(), gpus=8))
    launched, replayed = [line for line in text.splitlines() if "a scale at a time" in line]
    assert launched.endswith("h")
    assert re.search(r"a scale at a time +[\d,]{9,} \d\.\d\d$", replayed)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(f8sub.Float8ConfigError, match="no numbered blocks"):
        f8sub.estimate_step(nn.ModuleDict({"a": nn.Linear(64, 64)}))


def test_what_is_frozen_is_neither_reduced_nor_stepped():
    model = load("llama3-8b")
    model.requires_grad_(False)
    model.layers[0].requires_grad_()
    found, whole = (f8sub.estimate_step(each, [8], tokens=8192) for each in (model, load("llama3-8b")))
    elements = sum(p.numel() for p in model.layers[0].parameters())
    assert found.shapes.learning == elements
    for one, other in zip(found.predictions, whole.predictions, strict=True):
        assert one.optimizer < other.optimizer / 30
        assert one.replayed_seconds < other.replayed_seconds


def test_a_graph_is_advised_where_it_gains():
    large, small = (
        str(f8sub.estimate_step(model, 8, tokens=2048)) for model in (load("llama3-8b"), Transformer())
    )
    assert "Replay the step by" in " ".join(large.split())
    assert "So few tokens gain nothing on the GPU either" in " ".join(small.split())


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({"checkpoint": "selective"}, {"float8 compute": 0.85, GATHERS: 0.78, "+ gradients in e4m3": 0.72}),
        ({"checkpoint": "none"}, {GATHERS: 0.75}),
        ({"tensor_parallel": 2, "tokens": 8192}, {GATHERS: 0.95}),
    ],
)
def test_no_gain_is_predicted_where_a_loss_was_measured(options, measured):
    """Launched steps of a Llama 3 8B on four H200s: docs/measurements/several_gpus.md. Replayed they gain."""
    found = f8sub.estimate_step(load("llama3-8b"), 4, **{"gpu": "H200", "tokens": 2048, **options})
    for way, ratio in measured.items():
        launched = found.of(4, way)
        assert launched.over_bf16 < 1
        assert launched.over_bf16 == pytest.approx(ratio, rel=0.1)
        assert launched.replayed > 1
        assert launched.host_binds
    if "tensor_parallel" not in options:
        alone = f8sub.estimate(
            load("llama3-8b"), "tensorwise", gpus="H200", tokens=2048, mesh=(4,), **options
        )
        assert alone.predictions[0].step == pytest.approx(found.of(4, GATHERS).over_bf16)
        assert alone.predictions[0].replayed == pytest.approx(found.of(4, GATHERS).replayed)
        assert any("f8sub.graph_step" in sentence for sentence in alone.advice)


def test_one_gpu_and_many_have_one_engine():
    """Both estimates of one GPU, and of eight, are the same to the bit."""
    model = load("llama3-8b")
    for gpus in (1, 8):
        step = f8sub.estimate_step(model, gpus, gpu="H200", recipe="rowwise").of(gpus, GATHERS)
        (found,) = f8sub.estimate(model, "rowwise", gpus="H200", mesh=(gpus,)).predictions
        assert (found.step_seconds, found.step, found.replayed_seconds, found.host_seconds) == (
            step.seconds,
            step.over_bf16,
            step.replayed_seconds,
            step.host_seconds,
        )
