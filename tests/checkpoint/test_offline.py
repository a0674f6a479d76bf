"""A finished checkpoint exported on a CPU has the codes that training's own export has."""

import copy
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file

import f8sub
from f8sub.checkpoint.offline import export_checkpoint
from tests.checkpoint.models import BF16, llama, trained
from tests.checkpoint.nets import NETS


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(copy.deepcopy(model.config))


def test_a_checkpoint_of_another_model(tmp_path):
    model = trained("blockwise", steps=0)
    dcp.save({"net": {"a.weight": torch.ones(2, 2)}}, checkpoint_id=tmp_path / "in", no_dist=True)
    with pytest.raises(f8sub.Float8ConfigError, match=r"lacks lm_head.weight, .* It has a\.weight"):
        export_checkpoint(tmp_path / "in", tmp_path / "out", on_meta(model), recipe="rowwise", prefix="net.")
    assert not (tmp_path / "out").exists()


def test_infinite_weights_and_recipes_with_histories_are_refused(tmp_path):
    model = trained("blockwise", steps=0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    with pytest.raises(
        f8sub.Float8NumericsError, match=r"layers\.0\.mlp\.up_proj\.weight .* NaN or infinity"
    ):
        export_checkpoint(tmp_path / "in", tmp_path / "out", on_meta(model), recipe="rowwise")
    with pytest.raises(f8sub.Float8ConfigError, match="amaxes of past steps"):
        export_checkpoint(tmp_path / "in", tmp_path / "out", on_meta(model), recipe="delayed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def saved_net(net: torch.nn.Module, folder, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> None:
    """A folder of safetensors without ``config.json``."""
    folder.mkdir()
    state = {k: torch.tensor(v.detach().numpy()) for k, v in net.state_dict().items() if k not in drop}
    save_file({**state, **changes}, folder / "model.safetensors")


@pytest.mark.parametrize("dropped", ["embed.weight", "lm_head.weight"])
def test_a_tied_weight_may_have_either_name(dropped, tmp_path):
    net = NETS["tied"]()
    saved_net(net, tmp_path / "in", (dropped,))
    export_checkpoint(tmp_path / "in", tmp_path / "out", NETS["tied"](), recipe="blockwise")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["embed.weight"], net.embed.weight.detach().to(BF16))
    assert "lm_head.weight" not in found


def test_buffers_stay_as_forward_reads_them(tmp_path):
    net = NETS["buffered"]()
    saved_net(net, tmp_path / "in")
    export_checkpoint(tmp_path / "in", tmp_path / "out", NETS["buffered"](), recipe="blockwise")
    f8sub.save_float8(f8sub.convert_to_float8(net, recipe="blockwise"), tmp_path / "own", dtype=BF16)
    for folder in ("out", "own"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert torch.equal(found["bias"], net.bias)
        assert found["steps"].item() == 2**40 + 1


def test_another_shape_is_refused(tmp_path):
    saved_net(NETS["plain"](), tmp_path / "in", **{"up.weight": torch.ones(128, 256)})
    with pytest.raises(
        f8sub.Float8ShapeError, match=r"up\.weight: the model has \(256, 256\), .* \(128, 256\)"
    ):
        export_checkpoint(tmp_path / "in", tmp_path / "out", NETS["plain"](), recipe="blockwise")
    assert not (tmp_path / "out").exists()


def test_codes_are_not_cast_as_if_they_were_values(tmp_path):
    f8sub.save_float8(
        f8sub.convert_to_float8(NETS["plain"](), recipe="blockwise"), tmp_path / "in", dtype=BF16
    )
    with pytest.raises(f8sub.Float8ConfigError, match="is quantized already"):
        export_checkpoint(tmp_path / "in", tmp_path / "out", NETS["plain"](), recipe="blockwise")
    (tmp_path / "in" / "config.json").unlink()
    with pytest.raises(f8sub.Float8ConfigError, match=r"weight is torch\.float8_e4m3fn in the checkpoint"):
        export_checkpoint(tmp_path / "in", tmp_path / "out", NETS["plain"](), recipe="blockwise")
    assert not (tmp_path / "out").exists()


def test_weights_that_dtype_cannot_hold(tmp_path):
    saved_net(NETS["plain"](), tmp_path / "in", **{"up.weight": torch.full((256, 256), 1e6)})
    with pytest.raises(f8sub.Float8NumericsError, match=r"up\.weight"):
        export_checkpoint(
            tmp_path / "in", tmp_path / "out", NETS["plain"](), recipe="blockwise", dtype=torch.float16
        )


def test_damaged_checkpoints_of_dcp(tmp_path):
    state = {"a." + k: v.detach() for k, v in NETS["plain"]().state_dict().items()}

    def fails(folder: str, words: str) -> None:
        with pytest.raises(f8sub.Float8ConfigError, match=words):
            export_checkpoint(tmp_path / folder, tmp_path / "out", NETS["plain"](), recipe="blockwise")
        assert not (tmp_path / "out").exists()

    for folder in ("index", "lost", "cut", "async"):
        dcp.save(state, checkpoint_id=tmp_path / folder, no_dist=True)
    index = tmp_path / "index" / ".metadata"
    index.write_bytes(b"\x80\x04cut")
    fails("index", r"\.metadata is no index")
    index.write_text(f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR.")
    fails("index", r"\.metadata asks for (os|posix)\.system, which no index")
    assert not (tmp_path / "ran").exists()
    dcp.save({**state, "a.up.weight": {1}}, checkpoint_id=index.parent, no_dist=True)
    metadata = pickle.loads(index.read_bytes())
    metadata.state_dict_metadata["a.up.weight"].size = torch.Size((256, 256))
    index.write_bytes(pickle.dumps(metadata))
    fails("index", r"lacks up\.weight")
    (data,) = (tmp_path / "lost").glob("*.distcp")
    data.unlink()
    fails("lost", r"holds a\.down\.weight cannot be read|holds a\.up\.weight cannot be read")
    (data,) = (tmp_path / "cut").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    fails("cut", "cannot be read")
    (tmp_path / "async" / ".metadata").unlink()
    (tmp_path / "index" / "config.json").write_text("{")
    dcp.save(state, checkpoint_id=tmp_path / "index", no_dist=True)
    fails("index", r"config\.json is no JSON")
    fails("async", r"\.distcp files have no \.metadata, so saving it was cut short")


def shift(chunk):
    chunk.offsets = torch.Size((chunk.offsets[0] + 1, 0))


def grow(chunk):
    chunk.sizes = torch.Size((chunk.sizes[0] - 1, 256))


INDICES = {
    "a part is gone": (lambda entry, _: entry.chunks.pop(), "its parts have 32768 of 65536 elements"),
    "all are gone": (lambda entry, _: entry.chunks.clear(), "its parts have 0 of 65536 elements"),
    "a part twice": (lambda entry, _: entry.chunks.append(entry.chunks[0]), "overlap"),
    "a part begins late": (lambda entry, _: shift(entry.chunks[0]), r"at \(1, 0\) and \(128, 0\) overlap"),
    "a part reaches out": (lambda entry, _: shift(entry.chunks[1]), r"at \(129, 0\) reaches beyond it"),
    "a part is small": (lambda entry, _: grow(entry.chunks[1]), "its parts have 65280 of 65536 elements"),
    "no file": (lambda _, files: files.pop(next(k for k in files if k.fqn == "up.weight")), "names no file"),
    "no parts": (lambda entry, _: vars(entry).pop("chunks"), "is no index of"),
    "a text as size": (lambda entry, _: setattr(entry, "size", "ab"), "has the size 'ab'"),
    "a negative size": (lambda entry, _: setattr(entry.chunks[0], "sizes", (-1, 256)), "has the part"),
    "a number as name": (lambda entry, _: None, "3 is a name"),
    "no dtype": (lambda entry, _: setattr(entry.properties, "dtype", None), "up.weight has no dtype"),
    "no place": (lambda _, files: [vars(info).pop("offset") for info in files.values()], "is no index of"),
    "a foreign file": (
        lambda _, files: [setattr(info, "relative_path", "../a") for info in files.values()],
        "not in the folder",
    ),
}


@pytest.mark.parametrize("damage", INDICES)
def test_an_index_that_does_not_cover_a_tensor_once_is_refused(damage, tmp_path, monkeypatch):
    """torch's loader leaves memory without values where no part of a tensor is."""
    net = NETS["plain"]()
    dcp.save(dict(net.state_dict()), checkpoint_id=tmp_path / "in", no_dist=True)
    index = tmp_path / "in" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    entry, files = metadata.state_dict_metadata["up.weight"], metadata.storage_data
    key = next(k for k in files if k.fqn == "up.weight")
    entry.chunks = [
        dcp.metadata.ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((128, 256))) for at in (0, 128)
    ]
    files[dcp.metadata.MetadataIndex("up.weight", (128, 0))] = copy.copy(files[key])
    index.write_bytes(pickle.dumps(metadata))
    export_checkpoint(tmp_path / "in", tmp_path / "whole", NETS["plain"](), recipe="blockwise")
    change, words = INDICES[damage]
    change(entry, files)
    if damage == "a number as name":
        metadata.state_dict_metadata[3] = entry
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(f8sub.Float8ConfigError, match=words):
        export_checkpoint(tmp_path / "in", tmp_path / "out", NETS["plain"](), recipe="blockwise")
    assert not (tmp_path / "out").exists()


def test_an_index_asks_for_no_more_memory_than_it_has_bytes(tmp_path):
    """A place of 2 ** 31 in a pickle's memo is 32 GiB that Python's unpickler would fill with zeros."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / ".metadata").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    with pytest.raises(f8sub.Float8ConfigError, match="a memo of 2147483647 places in a pickle of 9 bytes"):
        export_checkpoint(tmp_path / "in", tmp_path / "out", NETS["plain"](), recipe="blockwise")


def test_a_model_and_its_average_need_a_prefix(tmp_path):
    net, other = NETS["plain"](), NETS["plain"]()
    with torch.no_grad():
        other.up.weight.mul_(2)
    state = {"model": dict(net.state_dict()), "ema": dict(other.state_dict())}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    with pytest.raises(f8sub.Float8ConfigError, match=r"several times, .* 'ema\.', 'model\.'; give prefix="):
        export_checkpoint(tmp_path / "in", tmp_path / "out", NETS["plain"](), recipe="blockwise")
    export_checkpoint(tmp_path / "in", tmp_path / "out", NETS["plain"](), recipe="blockwise", prefix="ema.")
    f8sub.save_float8(f8sub.convert_to_float8(other, recipe="blockwise"), tmp_path / "own", dtype=BF16)
    found, own = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "own"))
    assert all(torch.equal(found[k].view(torch.uint8), own[k].view(torch.uint8)) for k in own)


def test_the_models_own_config_where_the_checkpoint_has_none(tmp_path):
    model = llama()
    saved_net(model, tmp_path / "in")
    given = {"max_position_embeddings": 7}
    export_checkpoint(tmp_path / "in", tmp_path / "out", on_meta(model), recipe="blockwise", config=given)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 7
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["hidden_size"] == 256
