from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    data_parallel_shard_degree: int = -1
    tensor_parallel_degree: int = 1
