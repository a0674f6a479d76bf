"""f8sub inside of torchtitan, from outside: ``f8sub.titan`` is what its users name.

``options`` and ``scales`` know no torchtitan and serve any version of it; ``converter`` and ``configs`` are for 0.3,
``job_config`` is for 0.2.
"""
