"""GPUs on hosts, and the seconds that FSDP2's collectives take over them."""

from dataclasses import dataclass

from f8sub.estimator.gpus import H100, H200, Gpu

LINK = 2.3
"""A GPU's bytes/s in a collective by itself, as a multiple of ``Gpu.link``, which is fitted to those that products run
beside: two H200s had 0.27 to 0.30 TB/s, as ``scripts/bench/gradients.py`` measures it."""

NETWORK = 0.75
"""Share of a NIC's rate that large collectives reach."""

STEP, STEP_OF_NETWORK, MOST_STEPS = 3e-6, 12e-6, 4e-4
"""Seconds of a ring's step within a host and between hosts; of all steps, NCCL having trees for many ranks."""

CODE = 1 + 1 / 128
"""Bytes of a gradient's element as e4m3 with its block's exponent; see ``f8sub.gradients``."""

FLOAT32, BF16, E4M3, E4M3_FLAT = "float32", "bf16", "e4m3", "e4m3-flat"
REDUCTIONS = {FLOAT32: 4.0, BF16: 2.0, E4M3: CODE, E4M3_FLAT: CODE}
"""How gradients are reduced: rings of FSDP2 with sums in that dtype, and ``reduce_gradients_in_float8``; bytes."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ranks of a mesh: shards next to each other, those of tensor parallelism innermost.

    Attributes:
        gpu: of one kind.
        gpus: how many.
        per_host: that NVLink joins.
        network: bits/s of a GPU's NIC.
        replicas: copies of the weights, HSDP's.
        parts: GPUs that share a layer, by tensor parallelism.
    """

    gpu: Gpu
    gpus: int
    per_host: int = 8
    network: float = 400e9
    replicas: int = 1
    parts: int = 1

    @property
    def shards(self) -> int:
        """Ranks of a shard group."""
        return self.gpus // self.replicas // self.parts

    @property
    def neighbours(self) -> int:
        """Ranks of a shard group on one host."""
        return min(self.shards, max(1, self.per_host // self.parts))

    @property
    def hosts(self) -> int:
        """Of a shard group."""
        return self.shards // self.neighbours

    @property
    def link(self) -> float:
        """bytes/s of a GPU to others of its host."""
        return self.gpu.link * LINK

    @property
    def nic(self) -> float:
        """bytes/s of a GPU to other hosts."""
        return self.network / 8 * NETWORK

    def ring(self, size: float) -> float:
        """Seconds of an all-gather or reduce-scatter of so many bytes in all."""
        away = size * (self.shards - 1) / self.shards
        across = away / self.neighbours / self.nic if self.hosts > 1 else 0.0
        return max(away / self.link, across) + self._steps()

    def exchange(self, elements: float, flat: bool) -> float:
        """Seconds of the exchange of e4m3 codes; over several hosts in two hops, bfloat16 within each."""
        if self.hosts == 1:
            return elements * CODE * (self.shards - 1) / self.shards / self.link + self._steps()
        if flat or self.neighbours == 1:
            away = (self.shards - self.neighbours) / self.shards
            return elements * CODE * away / self.nic + self._steps()
        within = elements * 2 * (self.neighbours - 1) / self.neighbours / self.link
        across = elements / self.neighbours * CODE * (self.hosts - 1) / self.hosts / self.nic
        return within + across + self._steps()

    def all_reduce(self, size: float) -> float:
        """Seconds of HSDP's all-reduce of a shard of so many bytes over the replicas."""
        if self.replicas == 1:
            return 0.0
        rate = self.nic if self.gpus > self.per_host else self.link
        return 2 * size * (self.replicas - 1) / self.replicas / rate + self.latency

    @property
    def latency(self) -> float:
        """Seconds of an all-reduce of few bytes over all GPUs."""
        return 2e-5 + STEP_OF_NETWORK * max(1, (self.gpus // self.per_host).bit_length())

    def _steps(self) -> float:
        if self.hosts == 1:
            return (self.shards - 1) * STEP
        return min((self.hosts - 1) * STEP_OF_NETWORK + (self.shards - self.hosts) * STEP, MOST_STEPS)


_POWER = 0.74
"""Share of what products reach at 700 W; fitted to the published runs of a Llama 3 8B, whose page tells the limit."""

H100_500W = Gpu(
    "H100-500W",
    {kind: rate * _POWER for kind, rate in H100.rates.items()},
    H200.copy * 2.4 / 4.8,
    H100.attention * _POWER,
    H100.link,
    H100.network,
    96e9,
    "an H100 of 96 GB and 2.4 TB/s at 500 W, which published runs had; fitted to them",
    grouped=H100.grouped,
)
