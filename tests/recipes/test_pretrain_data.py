"""The stream of tokens: what is in it, how ranks share it, and that a saved place is found again exactly."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from f8sub_pretrain.data import ByteTokenizer, PackedSequences, load_tokenizer
from f8sub_pretrain.documents import DataError, open_source
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.recipes.runs import changed, quick_settings

DOCUMENTS = [f"document {number} " + "word " * (number * 7 % 13) for number in range(40)]


@pytest.fixture
def folder(tmp_path):
    """Forty documents in four jsonl files."""
    folder = tmp_path / "text"
    folder.mkdir()
    for start in range(0, 40, 10):
        rows = [json.dumps({"text": text}) for text in DOCUMENTS[start : start + 10]]
        (folder / f"{start:02d}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def packed(source, split="train", rank=0, world=1, seed=0, seq_len=15):
    settings = quick_settings(Path("unused"), f"--data.source {source} --training.seq_len {seq_len}")
    settings = changed(settings, "training", seed=seed)
    return PackedSequences(settings, ByteTokenizer(), split, rank, world)


def whole_documents(source, split, sequences):
    """The texts that one epoch or more of the stream holds; those that it cuts off are left out."""
    data, lanes = packed(source, split), {}
    for _ in range(sequences):
        lanes.setdefault(data.state_dict()["turn"], []).extend(data.next_batch(1).flatten().tolist())
    pieces = ["".join(map(chr, tokens)).split(chr(256))[:-1] for tokens in lanes.values()]
    return [text for piece in pieces for text in piece]


def test_documents_are_packed_whole_and_train_and_eval_share_none_and_miss_none(folder):
    found = {split: whole_documents(folder, split, 600) for split in ("train", "eval")}
    assert len(found["train"]) > 60
    seen = {split: set(texts) for split, texts in found.items()}
    assert not seen["train"] & seen["eval"]
    assert seen["train"] | seen["eval"] == set(DOCUMENTS)
    assert seen["eval"]


def test_a_batch_is_from_many_documents(folder):
    data = packed(folder)
    data.next_batch(30)
    places = [tuple(lane[:3]) for lane in data.state_dict()["lanes"] if lane is not None]
    assert len(set(places)) == len(places) > 20


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_share_the_same_stream(folder, world):
    alone = packed(folder).next_batch(4 * world)
    together = [packed(folder, rank=rank, world=world).next_batch(4) for rank in range(world)]
    assert torch.equal(alone, torch.stack(together, dim=1).flatten(0, 1))
    assert not torch.equal(alone, packed(folder, seed=1).next_batch(4 * world))


def test_every_epoch_has_every_document_once_in_another_order(folder):
    walk = packed(folder)._walk(packed(folder)._next)
    epochs = {0: [], 1: []}
    for place, tokens in walk:
        if place.epoch == 2:
            break
        epochs[place.epoch].append(tokens.tobytes())
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) > 35


@pytest.mark.parametrize("batches", range(0, 130, 7))
def test_a_saved_place_is_found_again(folder, batches):
    data, again = packed(folder), packed(folder)
    for _ in range(batches):
        data.next_batch(1)
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    for _ in range(60):
        assert torch.equal(data.next_batch(1), again.next_batch(1))


def test_a_place_holds_for_another_number_of_ranks(folder):
    two = [packed(folder, rank=rank, world=2) for rank in range(2)]
    for data in two:
        data.next_batch(3)
    assert two[0].state_dict() == two[1].state_dict()
    alone = packed(folder)
    alone.load_state_dict(two[0].state_dict())
    expected = packed(folder)
    expected.next_batch(6)
    assert torch.equal(alone.next_batch(5), expected.next_batch(5))


def test_a_place_in_other_data_is_refused(folder):
    state = packed(folder).state_dict()
    with pytest.raises(DataError, match="belongs to seed = 0, but this run has 1"):
        packed(folder, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="belongs to source = "):
        packed("stdlib").load_state_dict(state)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_format_gives_the_same_documents(tmp_path, suffix):
    path = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        table = pyarrow.table({"n": range(40), "text": DOCUMENTS})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    else:
        path.write_text("\n".join(json.dumps({"text": text}) for text in DOCUMENTS))
    assert list(open_source(str(path), "text").documents(0)) == DOCUMENTS


def test_a_long_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    text = "".join(f"line {number}\n" for number in range(10_000))
    (tmp_path / "long.txt").write_text(text)
    pieces = list(open_source(str(tmp_path / "long.txt"), "text").documents(0))
    assert len(pieces) > 3
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)


def test_the_standard_library_is_there():
    source = open_source("stdlib", "text")
    names = [path.name for path in source._paths]
    assert len(source) > 300
    assert "def dataclass(" in "".join(source.documents(names.index("dataclasses.py")))


def test_hidden_files_of_a_folder_are_left_alone(folder):
    (folder / ".cache").mkdir()
    (folder / ".cache" / "index.bin").write_bytes(b"\xff\xfe")
    (folder / ".gitignore").write_text("*")
    assert len(open_source(str(folder), "text")) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "a.jsonl, line 2: is not JSON"),
        ("a.jsonl", b'{"content": "x"}', "no text in column 'text'; it has content. Set data.text_field"),
        ("a.jsonl", b"[1]", "line 1: no text in column 'text'; it has list"),
        ("a.txt", b"\xff\xfe\x00", "a.txt: is not UTF-8 text"),
        ("a.parquet", {"content": ["x"]}, r"a\.parquet: no text in column 'text'; it has content"),
    ],
)
def test_files_that_are_not_text_are_refused_by_name(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, dict):
        pyarrow.parquet.write_table(pyarrow.table(content), path)
    else:
        path.write_bytes(content)
    source = open_source(str(path), "text")
    with pytest.raises(DataError, match=message):
        list(source.documents(0))


@pytest.mark.parametrize("source", ["/no/such/folder", "nothing", "some/file.jsonl", "./here"])
def test_a_missing_source_is_refused(tmp_path, source):
    with pytest.raises(DataError, match="no such file or folder"):
        open_source(source, "text")
    with pytest.raises(DataError, match="the folder has no files"):
        open_source(str(tmp_path), "text")


def test_a_hub_dataset_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        open_source("owner/name", "text")


class FakeDatasets:
    """Stands for the ``datasets`` library: two rows, one configuration."""

    @staticmethod
    def load_dataset(path, config, split, streaming):
        if (path, config, split, streaming) != ("owner/name", "en", "train", True):
            raise FileNotFoundError(f"{path} {config}")
        return [{"text": "one"}, {"text": "two"}]


def test_a_hub_dataset_is_streamed(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets)
    assert list(open_source("owner/name:en", "text").documents(0)) == ["one", "two"]
    with pytest.raises(DataError, match=r"owner/other.*cannot open it.*FileNotFoundError"):
        open_source("owner/other", "text")
    with pytest.raises(DataError, match="owner/name:en, row 0: no text in column 'body'; it has text"):
        list(open_source("owner/name:en", "body").documents(0))


@pytest.mark.parametrize("texts", [["only one"], ["", ""]], ids=["one", "empty"])
def test_a_split_without_text_is_refused_and_does_not_hang(tmp_path, texts):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    with pytest.raises(DataError, match="has no text for the train split"):
        packed(path).next_batch(1)


def test_bytes_that_are_no_unicode_survive():
    assert ByteTokenizer().encode("é\ud800").tolist() == [0xC3, 0xA9, ord("?"), 256]


def small_tokenizer(folder, **special):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2, "</s>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", **special).save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_from_a_folder(tmp_path):
    tokenizer = load_tokenizer(small_tokenizer(tmp_path, eos_token="</s>"))
    assert tokenizer.vocab_size == 4
    assert np.array_equal(tokenizer.encode("world hello there"), [2, 1, 0, 3])


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(DataError, match="neither an end-of-text nor a begin-of-text token"):
        load_tokenizer(small_tokenizer(tmp_path / "no_separator"))
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer("meta-llama/Llama-3")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="transformers cannot load it"):
        load_tokenizer(str(tmp_path / "empty"))
