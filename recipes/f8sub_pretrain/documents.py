"""Where text comes from: files, folders, Hugging Face datasets, the standard library's own source."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TEXT_PIECE = 16 * 1024
"""A longer plain-text file is several documents, cut at the first line end after so many characters."""


class DataError(ValueError):
    """Text that cannot be found, read or resumed."""


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


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _standard_library() -> list[Path]:
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    paths: list[Path] = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        # What is installed may be a hundred times as many files; they are not looked at.
        folders[:] = [name for name in folders if name not in left_out]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(paths)


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
