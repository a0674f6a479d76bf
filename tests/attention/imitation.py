"""An imitation of cuDNN on CPUs: graphs that compute by the reference what they read and write by address."""

import ctypes
from typing import Any

import pytest
import torch

from f8sub.attention import cudnn, reference
from f8sub.attention.problem import E4M3
from f8sub.attention.scaling import BackwardScales, ForwardScales

NAMES = {number: name for name, number in cudnn._UIDS.items()}


class Graph:
    """What ``cudnn.build`` returns for one problem."""

    def __init__(self, kind: str, problem: Any, format: Any, dtype: torch.dtype, target: Any) -> None:
        self.kind, self.problem, self.format, self.dtype = kind, problem, format, dtype
        self.layouts = cudnn._layouts(problem)

    def build_plans(self) -> None:
        pass

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pointers: dict[int, int], workspace: int, handle: Any) -> None:
        assert workspace
        at = {NAMES[number]: address for number, address in pointers.items()}

        def matrix(name: str, dtype: torch.dtype) -> torch.Tensor:
            layout = self.layouts[name]
            count = torch.Size(layout["dim"]).numel()
            return memory(at.pop(name), count, dtype).as_strided(layout["dim"], layout["stride"])

        def number(*names: str) -> torch.Tensor:
            return torch.cat([memory(at.pop(name), 1, torch.float32) for name in names])

        io = self.dtype if self.kind == "bf16 backward" else E4M3.dtype
        q, k, v, o = (matrix(name, io) for name in "qkvo")
        stats = matrix("stats", torch.float32)
        if self.kind == "forward":
            inverse = number("descale_q", "descale_k", "descale_v")
            scales = ForwardScales(inverse, number("scale_o"), number("scale_s", "descale_s"))
            for made, found in zip((o, stats), reference.forward(self.problem, q, k, v, scales), strict=True):
                made.copy_(found)
            for name in ("amax_s", "amax_o"):
                memory(at.pop(name), 1, torch.float32).fill_(torch.nan)
        else:
            grads = [matrix(name, io) for name in ("dQ", "dK", "dV")]
            if self.kind == "backward":
                given = matrix("dO", self.format.dtype), q, k, v, o, stats
                inverse = number("descale_q", "descale_k", "descale_v", "descale_o")
                scales = BackwardScales(
                    number("scale_dP", "scale_dQ", "scale_dK", "scale_dV"),
                    number("descale_dP"),
                    number("scale_s", "descale_s"),
                )
                of_do = number("descale_dO")
                found, amaxes = reference.backward(self.problem, given, inverse, of_do, scales, self.format)
                for name, amax in zip(("amax_dP", "amax_dQ", "amax_dK", "amax_dV"), amaxes, strict=True):
                    memory(at.pop(name), 1, torch.float32).copy_(amax)
            else:
                given = matrix("dO", io), q, k, v, o, stats
                found = reference.backward_in_high_precision(self.problem, given)
            for made, grad in zip(grads, found, strict=True):
                made.copy_(grad)
        assert not at


def memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    bytes = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes, dtype=torch.uint8).view(dtype)


def imitate(patch: pytest.MonkeyPatch) -> None:
    """Have the backend "cudnn" run on CPUs."""
    patch.setattr(cudnn, "build", Graph)
    patch.setattr(cudnn, "_graphs", {})
    patch.setattr(cudnn, "_handle", lambda device: None)
    patch.setattr(cudnn, "_compute_capability", lambda device: 90)
