"""f8sub inside of torchtitan, from outside: ``f8sub.titan`` is what its users name.

``options`` knows no torchtitan and serves any version of it; ``converter`` and ``configs`` are for 0.3, ``job_config``
is for 0.2. What a run does besides is in ``torchtitan_hooks``.
"""
