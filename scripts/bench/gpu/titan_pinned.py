"""torchtitan's command line, each rank on CPU cores of its own: ``titan.py --program scripts.bench.gpu.titan_pinned``.

Threads inherit the cores, so they are chosen before torch is imported.
"""

import os
import runpy

if __name__ == "__main__":
    cores = sorted(os.sched_getaffinity(0))
    rank, ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    os.sched_setaffinity(0, cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks])
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
