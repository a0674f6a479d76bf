"""Groups of rows, one an expert: where they lie is known to the device alone, and nothing here reads it on the host.

But for ``Groups.host_bounds``.
"""

from typing import NamedTuple

import torch

from f8sub.formats import ALL


class Groups(NamedTuple):
    """Where groups of rows lie.

    Attributes:
        first: int32, (E,), the first row of each group.
        ends: int32, (E,), the row after its last one.
        rows: of the buffer that they lie in, a number that the host knows.
    """

    first: torch.Tensor
    ends: torch.Tensor
    rows: int

    @classmethod
    def of(cls, ends: torch.Tensor, rows: int) -> "Groups":
        """Groups that follow each other from the first row on."""
        return cls(torch.cat([ends.new_zeros(1), ends[:-1]]), ends, rows)

    @property
    def host_bounds(self) -> list[tuple[int, int]]:
        """First row and end of each group, read on the host: for the reference alone."""
        return list(zip(self.first.tolist(), self.ends.tolist(), strict=True))

    @property
    def past(self) -> torch.Tensor:
        """Bool, (rows, 1): the rows after the last group."""
        row = torch.arange(self.rows, device=self.ends.device, dtype=self.ends.dtype)
        return (row >= self.ends[-1])[:, None]

    def of_row(self) -> torch.Tensor:
        """int64, (rows,): the group of each row of groups that follow each other; E for rows past the last one."""
        row = torch.arange(self.rows, device=self.ends.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, row, right=True)

    def aligned(self, edge: int) -> "Groups":
        """The same groups, each from a multiple of ``edge`` on, in a buffer that has room for any groups."""
        counts = self.ends - self.first
        room = (counts + (edge - 1)) // edge * edge
        first = (room.cumsum(0) - room).to(self.ends.dtype)
        return Groups(first, first + counts, aligned_rows(self.rows, len(counts), edge))

    def source_in(self, compact: "Groups") -> torch.Tensor:
        """(rows,): the row of ``compact`` that each row of these aligned groups is, ``compact.rows`` for none."""
        row = torch.arange(self.rows, device=self.first.device, dtype=self.first.dtype)
        group = self.of_aligned_row()
        return torch.where(
            row < self.ends[group], row - self.first[group] + compact.first[group], compact.rows
        )

    def of_aligned_row(self) -> torch.Tensor:
        """int64, (rows,): the group of each row of aligned groups; that before it for rows between two."""
        row = torch.arange(self.rows, device=self.first.device, dtype=self.first.dtype)
        return (torch.searchsorted(self.first, row, right=True) - 1).clamp(min=0)

    def place_of(self, compact: "Groups") -> torch.Tensor:
        """(compact.rows,): the row of these aligned groups that each row of ``compact`` is; ``rows`` for none."""
        row = torch.arange(compact.rows, device=self.first.device, dtype=self.first.dtype)
        group = compact.of_row().clamp(max=len(self.ends) - 1)
        return torch.where(row < compact.ends[-1], row - compact.first[group] + self.first[group], self.rows)


def aligned_rows(rows: int, count: int, edge: int) -> int:
    """Rows of a buffer that has room for any ``count`` groups of ``rows`` rows, each from a multiple of ``edge`` on."""
    return -(-(rows + count * (edge - 1)) // edge) * edge


def start_of_groups(edge: int, multiple: int) -> int:
    """What groups begin at multiples of where tiles have that edge along the rows; 1 where they follow each other."""
    return multiple if edge in (1, ALL) else edge


def laid_out(groups: Groups, edge: int, multiple: int) -> Groups:
    """Where groups lie in codes whose tiles have that edge along the rows; see ``tokens.quantize``."""
    start = start_of_groups(edge, multiple)
    return groups if start == 1 else groups.aligned(start)
