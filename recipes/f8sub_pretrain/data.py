"""Text into packed token sequences: the same stream on every rank, each taking its own sequences of it."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from f8sub_pretrain.documents import DataError, open_source
from f8sub_pretrain.settings import Settings

Tokens = npt.NDArray[np.int64]

_LANES = 32
"""Documents that are read side by side, so that a batch is not all from one of them."""


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


class Place(NamedTuple):
    """A document: the epoch, the file in that epoch's order, and the document in the file."""

    epoch: int
    file: int
    document: int


@dataclass
class _Lane:
    """A document that is being cut into sequences."""

    place: Place
    tokens: Tokens
    used: int = 0


class PackedSequences:
    """Batches of token sequences for one rank, and the place in the stream where the next one starts.

    Each lane packs documents back to back and cuts them into sequences; the lanes take turns, and one that is
    through with its document takes the next. Every rank walks the whole stream and keeps each
    ``world_size``-th sequence, so what all ranks together train on does not depend on how many they are, and
    a run may resume on another number of them. The order of files is shuffled anew in each epoch.
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
        self._turn = 0
        self._lanes: list[_Lane | None] = [None] * _LANES
        self._next = Place(0, 0, 0)
        self._documents = self._walk(self._next)

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
        lanes = [None if lane is None else [*lane.place, lane.used] for lane in self._lanes]
        return {"identity": self._identity, "turn": self._turn, "lanes": lanes, "next": list(self._next)}

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
        self._turn = state["turn"]
        self._next = Place(*state["next"])
        self._documents = self._walk(self._next)
        saved = [None if lane is None else (Place(*lane[:3]), lane[3]) for lane in state["lanes"]]
        tokens = self._read_again(lane[0] for lane in saved if lane is not None)
        self._lanes = [None if lane is None else _Lane(lane[0], tokens[lane[0]], lane[1]) for lane in saved]

    def _take(self) -> Tokens:
        turn, self._turn = self._turn, (self._turn + 1) % _LANES
        parts: list[Tokens] = []
        missing = self._length
        while missing:
            lane = self._lanes[turn]
            if lane is None:
                place, tokens = next(self._documents)
                lane = self._lanes[turn] = _Lane(place, tokens)
                self._next = place._replace(document=place.document + 1)
            part = lane.tokens[lane.used : lane.used + missing]
            parts.append(part)
            missing -= len(part)
            lane.used += len(part)
            if lane.used == len(lane.tokens):
                self._lanes[turn] = None
        return np.concatenate(parts)

    def _walk(self, start: Place) -> Iterator[tuple[Place, Tokens]]:
        for epoch in itertools.count(start.epoch):
            found = epoch == start.epoch and start > Place(epoch, 0, 0)
            for file, index in enumerate(self._order(epoch)):
                if (epoch, file) < start[:2]:
                    continue
                for row, text in enumerate(self._source.documents(index)):
                    place = Place(epoch, file, row)
                    kept_aside = (index + row) % self._every_nth == 0
                    if place >= start and text and kept_aside == (self._split == "eval"):
                        found = True
                        yield place, self._tokenizer.encode(text)
            if not found:
                raise DataError(
                    f"data.source = {self._identity['source']!r} has no text for the {self._split} split: "
                    f"one document in {self._every_nth} is kept for evaluation. Give at least two documents."
                )

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._source)))
        random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order

    def _read_again(self, places: Iterable[Place]) -> dict[Place, Tokens]:
        by_file: dict[tuple[int, int], set[int]] = defaultdict(set)
        for place in places:
            by_file[place.epoch, place.file].add(place.document)
        tokens = {}
        for (epoch, file), rows in by_file.items():
            texts = self._source.documents(self._order(epoch)[file])
            for row, text in enumerate(itertools.islice(texts, max(rows) + 1)):
                if row in rows:
                    tokens[Place(epoch, file, row)] = self._tokenizer.encode(text)
        return tokens
