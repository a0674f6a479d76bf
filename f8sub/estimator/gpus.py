"""Holds the rates of GPUs: FLOP/s of products by kind and of attention, bytes/s of copies and collectives.

Each figure names its source. Those of other GPUs than an H200 are its figures, scaled by what data sheets say of both,
but for the copies of an H100, which were measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from f8sub.convert.messages import REFERENCE_TIMES_BF16
from f8sub.errors import Float8ConfigError, unknown
from f8sub.formats import ALL, Float8Format, ScaleRule

if TYPE_CHECKING:
    from f8sub.recipe import GemmSpec

HIGH, WHOLE, ROWS, VECTORS, SQUARES = "high precision", "one scale", "one a row", "1x128", "squares"
VECTORS_BY_SQUARES, MX, FP4, OTHER = "1x128 by squares", "1x32, e8m0", "1x16, two levels", "other"
"""Kinds of products, by the scales of both operands."""

BY_REFERENCE = f"the reference backend is about {REFERENCE_TIMES_BF16} times slower than bf16"
"""Of products that have no kernel on a GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Holds the rates of one GPU.

    Attributes:
        name: as users write it.
        rates: FLOP/s of large products by kind; a kind that is not there runs on the reference backend.
        copy: bytes/s that a copy kernel reads and writes.
        attention: FLOP/s of causal attention, forward and backward.
        link: bytes/s of a GPU in collectives within a host of eight.
        memory: bytes.
        source: where the figures come from.
        measured: whether figures of whole training steps on this GPU are held to the estimate.
        grouped: kinds of float8 products that experts have a kernel for; others are multiplied in bf16.
    """

    name: str
    rates: Mapping[str, float]
    copy: float
    attention: float
    link: float
    memory: float
    source: str
    measured: bool = False
    grouped: frozenset[str] = frozenset()

    def rate(self, spec: "GemmSpec") -> float:
        """Return the FLOP/s of a large product; the reference backend's where the GPU has no kernel for it."""
        return self.rates.get(kind_of_product(spec), self.rates[HIGH] / REFERENCE_TIMES_BF16)

    def is_native(self, spec: "GemmSpec") -> bool:
        """Return whether f8sub has a kernel for the product on this GPU's tensor cores."""
        return kind_of_product(spec) in self.rates


def kind_of_product(spec: "GemmSpec") -> str:
    """Return one of the kinds above; ``OTHER`` for operands that go to the reference backend everywhere."""
    if spec.a is None or spec.b is None:
        return HIGH
    kinds = {kind_of_tiles(spec.a), kind_of_tiles(spec.b)}
    # One scale for the matrix is the same scale for every row.
    if kinds <= {WHOLE, ROWS}:
        return ROWS if ROWS in kinds else WHOLE
    if kinds == {VECTORS, SQUARES}:
        return VECTORS_BY_SQUARES
    # No kernel takes other mixtures.
    return kinds.pop() if len(kinds) == 1 else OTHER


def kind_of_tiles(format: Float8Format) -> str:
    """Return the kind of one operand's scales."""
    if not format.is_plain:
        return MX if format.scale_rule is ScaleRule.E8M0 else FP4
    tile = format.tile
    if tile.is_whole or tile.cols == ALL:
        return WHOLE if tile.is_whole else ROWS
    # No kernel multiplies narrower blocks.
    if tile.cols % 128:
        return OTHER
    return VECTORS if tile.rows == 1 else SQUARES


T = 1e12

_HOPPER = {
    HIGH: 716 * T,
    WHOLE: 1430 * T,
    ROWS: 1450 * T,
    VECTORS_BY_SQUARES: 1235 * T,
    VECTORS: 960 * T,
    SQUARES: 1280 * T,
}
"""Fitted to "Products by themselves" of ``tests/estimator/measured.toml``, docs/measurements/kernels.md, "GEMMs", on an
H200; a product's results are written besides. Data sheet: 989 in bf16, 1979 in float8, dense."""

_BLACKWELL = {HIGH: 2250 / 989, FP4: 9000 / 1979, **dict.fromkeys((WHOLE, ROWS, MX), 4500 / 1979)}
"""Ratios of data sheets' dense peaks to an H200's, of 4 and of 8 bits to its 8."""

_GROUPED = frozenset(_HOPPER) - {HIGH}
"""f8sub's own kernels, see docs/measurements; on Blackwell torch's alone, of scales of rows."""

# copy, bytes/s; attention, FLOP/s; link, bytes/s; memory, bytes
H200 = Gpu("H200", _HOPPER, 3.8 * T, 520 * T, 0.13 * T, 141e9, "held to measured runs", True, _GROUPED)
"""Copy: docs/measurements/kernels.md, "Quantizers". Attention and link are fitted to "Four blocks of a Llama 3 8B under
FSDP2" and to "Reduce-scatters of a step with 16 layers" of ``tests/estimator/measured.toml``. Memory: data sheet."""


def _by_data_sheet(
    name: str,
    peaks: Mapping[str, float],
    bandwidth: float,
    link: float,
    memory: float,
    note: str = ", not measured",
    grouped: frozenset[str] = frozenset(),
) -> Gpu:
    """Scale an H200 by peaks, TB/s of memory and GB/s of links to other GPUs of the host."""
    # Hopper does not have MX and FP4: those scale its rate for one scale per matrix.
    rates = {kind: _HOPPER.get(kind, _HOPPER[WHOLE]) * ratio for kind, ratio in peaks.items()}
    # 4.8 TB/s of memory and 900 GB/s of NVLink are an H200's.
    by_memory = bandwidth / 4.8
    # Attention runs in bf16.
    attention = H200.attention * peaks[HIGH]
    source = "from data sheets" + note
    by_link = H200.link * link / 900
    return Gpu(name, rates, H200.copy * by_memory, attention, by_link, memory, source, grouped=grouped)


H100 = replace(
    _by_data_sheet(
        "H100",
        dict.fromkeys(_HOPPER, 1.0),
        3.35,
        900,
        80e9,
        "; whole steps of a Llama on two were within 4 %",
        _GROUPED,
    ),
    copy=3.07 * T,
)
"""Its copies were measured: in a profiled step of docs/measurements, eager bf16 of Qwen3-30B-A3B, kernels that read and
write 0.4 to 1.6 GB have 3.07 to 3.10 TB/s: SwiGLU's, and the sum of two gradients."""
# 8 TB/s of memory, 1800 GB/s of NVLink, 180 GB
B200 = _by_data_sheet("B200", _BLACKWELL, 8.0, 1800, 180e9, grouped=frozenset({ROWS}))
GPUS = {gpu.name: gpu for gpu in (H200, H100, B200)}
"""Sources: NVIDIA's data sheets of H100 SXM, H200 SXM and HGX B200."""

_NO_FLOAT8, _OTHER_FLOAT8 = (
    "it has no float8 tensor cores",
    "it multiplies e4m3fnuz, to which f8sub does not cast",
)
WITHOUT_GAIN = {
    **dict.fromkeys(("V100", "A100"), _NO_FLOAT8),
    **dict.fromkeys(("MI300X", "MI325X"), _OTHER_FLOAT8),
}
"""GPUs that users ask for, and why float8 by f8sub gains nothing on them."""


def gpu_of(name: str, known: Mapping[str, Gpu] = GPUS) -> Gpu:
    """Return the GPU of that name, in whatever case it is written.

    Args:
        name: as users write it.
        known: GPUs by name.

    Raises:
        Float8ConfigError: there is none, and the message lists them; or float8 gains nothing on it.
    """
    of_name = {known_name.lower(): gpu for known_name, gpu in known.items()}
    if (found := of_name.get(name.lower())) is not None:
        return found
    # Its reason helps more than a list of GPUs that the user does not have.
    if why := WITHOUT_GAIN.get(name.upper()):
        raise Float8ConfigError(
            f"{name.upper()} gains nothing by f8sub: {why}; choose one of {', '.join(known)}"
        )
    raise unknown("GPU", name, known)
