from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass
class ParallelismContext:
    """In torchtitan 0.3, ``ParallelDims``."""

    mesh: DeviceMesh

    @classmethod
    def of_the_world(cls, world: int) -> "ParallelismContext":
        return cls(init_device_mesh("cpu", (world,)))
