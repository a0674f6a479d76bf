"""Text into packed token sequences: the same stream on every rank, each taking its own sequences of it."""

from __future__ import annotations

import itertools
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from settings import Settings

Tokens = npt.NDArray[np.int64]

_TEXT_PIECE = 16 * 1024
"""A longer plain-text file is several documents, cut at the first line end after so many characters."""


class DataError(ValueError):
    """Text that cannot be found, read or resumed."""


class Tokenizer(Protocol):
    """Text to token ids."""

    vocab_size: int

    def encode(self, text: str) -> Tokens:
        """Give the ids of one document, a separator at the end."""


class ByteTokenizer:
    """UTF-8 bytes, and 256 between documents."""

    vocab_size = 257

    def encode(self, text: str) -> Tokens:
        """Give the bytes of one document, the separator at the end."""
        data = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
        return np.append(data.astype(np.int64), 256)


class FolderTokenizer:
    """A tokenizer that transformers loads from a folder; its end-of-text token separates documents."""

    def __init__(self, folder: str) -> None:
        """Load the tokenizer; nothing is downloaded.

        Args:
            folder: Folder that has tokenizer.json, or what else transformers reads.

        Raises:
            DataError: If transformers cannot load it, or if it has no token to put between documents.
        """
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():
            raise DataError(
                f"data.tokenizer = {folder!r}: no such folder. "
                "Give 'byte' or a folder that has tokenizer.json."
            )
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(
                f"data.tokenizer = {folder!r}: transformers cannot load it ({error}). "
                "Give 'byte' or a folder that has tokenizer.json."
            ) from error
        ids = (self._tokenizer.eos_token_id, self._tokenizer.bos_token_id)
        separators = [token for token in ids if token is not None]
        if not separators:
            raise DataError(
                f"data.tokenizer = {folder!r}: has neither an end-of-text nor a begin-of-text token to put "
                "between documents. Name one as eos_token in its tokenizer_config.json."
            )
        self._separator = separators[0]
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str) -> Tokens:
        """Give the ids of one document, the separator at the end."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array([*ids, self._separator], dtype=np.int64)


def load_tokenizer(name: str) -> Tokenizer:
    """Give the tokenizer of ``data.tokenizer``: "byte" or a folder."""
    return ByteTokenizer() if name == "byte" else FolderTokenizer(name)


class Files:
    """Documents in text, jsonl and parquet files."""

    def __init__(self, paths: list[Path], text_field: str) -> None:
        self._paths = paths
        self._text_field = text_field

    def __len__(self) -> int:
        return len(self._paths)

    def documents(self, index: int) -> Iterator[str]:
        """Read the documents of one file, in order.

        Args:
            index: Which of the files, 0 to ``len(self) - 1``.

        Yields:
            The text of each document.

        Raises:
            DataError: If the file is not what its name says, or lacks the text column.
        """
        path = self._paths[index]
        if path.suffix == ".parquet":
            return self._parquet(path)
        if path.suffix == ".jsonl":
            return self._jsonl(path)
        return _text_pieces(path)

    def _jsonl(self, path: Path) -> Iterator[str]:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}, line {number}: is not JSON ({error}).") from error
                yield _text_of(row, self._text_field, f"{path}, line {number}")

    def _parquet(self, path: Path) -> Iterator[str]:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise DataError(f"{path}: reading parquet needs pyarrow: pip install pyarrow.") from error
        with parquet.ParquetFile(path) as file:
            if self._text_field not in file.schema_arrow.names:
                raise _no_text(str(path), self._text_field, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1024, columns=[self._text_field]):
                yield from (text or "" for text in batch.column(0).to_pylist())


class HubDataset:
    """Documents of the train split of a Hugging Face dataset, streamed."""

    def __init__(self, name: str, text_field: str) -> None:
        """Open the dataset.

        Args:
            name: owner/name, or owner/name:config.
            text_field: The column that holds the text.

        Raises:
            DataError: If the ``datasets`` package is missing or cannot open the dataset.
        """
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"data.source = {name!r}: no file or folder has this name, and to take it as a Hugging Face "
                "dataset the package `datasets` is needed: pip install datasets."
            ) from error
        path, _, config = name.partition(":")
        try:
            self._rows = datasets.load_dataset(path, config or None, split="train", streaming=True)
        except Exception as error:
            raise DataError(
                f"data.source = {name!r}: no file or folder has this name, and `datasets` cannot open it as "
                f"a Hugging Face dataset ({type(error).__name__}: {error}). Check the name and the network."
            ) from error
        self._name = name
        self._text_field = text_field

    def __len__(self) -> int:
        return 1

    def documents(self, index: int) -> Iterator[str]:
        """Read the rows in order; there is one stream, so ``index`` is 0."""
        for number, row in enumerate(self._rows):
            yield _text_of(row, self._text_field, f"{self._name}, row {number}")


def open_source(source: str, text_field: str) -> Files | HubDataset:
    """Find the documents of ``data.source``.

    Args:
        source: "stdlib", a file, a folder, or the name of a Hugging Face dataset.
        text_field: The column that holds the text where the documents have columns.

    Returns:
        The documents, file by file.

    Raises:
        DataError: If there is nothing of that name.
    """
    if source == "stdlib":
        return Files(_standard_library(), text_field)
    path = Path(source).expanduser()
    if path.is_file():
        return Files([path], text_field)
    if path.is_dir():
        paths = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
        if not paths:
            raise DataError(f"data.source = {source!r}: the folder has no files.")
        return Files(paths, text_field)
    if (
        source.startswith(("/", ".", "~"))
        or path.suffix in (".txt", ".jsonl", ".parquet")
        or "/" not in source
    ):
        raise DataError(
            f"data.source = {source!r}: no such file or folder. Give a text, jsonl or parquet file, a folder "
            "of them, a Hugging Face dataset (owner/name), or 'stdlib'."
        )
    return HubDataset(source, text_field)


class PackedSequences:
    """Batches of token sequences for one rank, and the place in the stream where the next one starts.

    Documents are packed back to back and cut into sequences. Every rank walks the whole stream and keeps
    each ``world_size``-th sequence, so what all ranks together train on does not depend on how many they are,
    and a run may resume on another number of them. The order of files is shuffled anew in each epoch.
    """

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        split: Literal["train", "eval"],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._length = settings.training.seq_len + 1
        self._seed = settings.training.seed
        self._every_nth = settings.data.eval_every_nth
        self._tokenizer = tokenizer
        self._split = split
        self._rank = rank
        self._world_size = world_size
        self._source = open_source(settings.data.source, settings.data.text_field)
        self._identity = {
            "source": settings.data.source,
            "files": len(self._source),
            "tokenizer": settings.data.tokenizer,
            "eval_every_nth": self._every_nth,
            "seed": self._seed,
        }
        self._place = {"epoch": 0, "file": 0, "document": 0, "token": 0}
        self._restart()

    def next_batch(self, batch_size: int) -> torch.Tensor:
        """Give this rank's next sequences.

        Args:
            batch_size: How many.

        Returns:
            int64 ``(batch_size, seq_len + 1)``: inputs are all but the last column, labels all but the first.

        Raises:
            DataError: If the split has no text.
        """
        rows = [self._take() for _ in range(batch_size * self._world_size)]
        return torch.from_numpy(np.stack(rows[self._rank :: self._world_size]))

    def state_dict(self) -> dict[str, Any]:
        """Give the place of the next sequence, the same on every rank, in plain values."""
        return {"identity": self._identity, "place": dict(self._place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that ``state_dict`` gave.

        Args:
            state: What ``state_dict`` gave.

        Raises:
            DataError: If the place is one in other text.
        """
        for key, here in self._identity.items():
            then = state["identity"].get(key)
            if then != here:
                raise DataError(
                    f"The checkpoint's place in the data belongs to {key} = {then!r}, but this run has "
                    f"{here!r}. Resume with the data settings of the run that saved it."
                )
        self._place = dict(state["place"])
        self._restart()

    def _restart(self) -> None:
        self._documents = self._walk(self._place["epoch"], self._place["file"], self._place["document"])
        self._current: Tokens | None = None

    def _take(self) -> Tokens:
        parts: list[Tokens] = []
        missing = self._length
        while missing:
            if self._current is None:
                place, self._current = next(self._documents)
                if place != {key: self._place[key] for key in place}:
                    self._place = {**place, "token": 0}
            start = self._place["token"]
            part = self._current[start : start + missing]
            parts.append(part)
            missing -= len(part)
            self._place["token"] = start + len(part)
            if self._place["token"] == len(self._current):
                self._place = {**self._place, "document": self._place["document"] + 1, "token": 0}
                self._current = None
        return np.concatenate(parts)

    def _walk(self, epoch: int, file: int, document: int) -> Iterator[tuple[dict[str, int], Tokens]]:
        for epoch_now in itertools.count(epoch):
            found = epoch_now == epoch and (file, document) != (0, 0)
            order = list(range(len(self._source)))
            random.Random(f"{self._seed} {epoch_now}").shuffle(order)
            for file_now in range(file, len(order)):
                index = order[file_now]
                for row, text in enumerate(self._source.documents(index)):
                    kept_aside = (index + row) % self._every_nth == 0
                    if row < document or kept_aside != (self._split == "eval") or not text:
                        continue
                    found = True
                    yield (
                        {"epoch": epoch_now, "file": file_now, "document": row},
                        self._tokenizer.encode(text),
                    )
                document = 0
            file = 0
            if not found:
                raise DataError(
                    f"data.source = {self._identity['source']!r} has no text for the {self._split} split: "
                    f"one document in {self._every_nth} is kept for evaluation. Give at least two documents."
                )


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    return sorted(
        path for path in root.rglob("*.py") if not left_out.intersection(path.relative_to(root).parts[:-1])
    )


def _text_pieces(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 text ({error}). Give text, .jsonl or .parquet files, not compressed."
        ) from error
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + _TEXT_PIECE)
        end = len(text) if line_end == -1 else line_end + 1
        yield text[start:end]
        start = end


def _text_of(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        raise _no_text(where, field, list(row) if isinstance(row, dict) else [type(row).__name__])
    text: str = row[field]
    return text


def _no_text(where: str, field: str, found: list[str]) -> DataError:
    return DataError(
        f"{where}: no text in column {field!r}; it has {', '.join(found) or 'nothing'}. Set data.text_field."
    )
