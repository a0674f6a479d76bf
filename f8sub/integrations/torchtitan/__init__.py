"""f8sub inside of torchtitan, from outside: ``f8sub.titan`` is what its users name.

``layout`` finds out which torchtitan is installed. ``options`` knows no torchtitan and serves any version of it;
``job_config`` is for 0.2, ``converter`` and ``configs`` for 0.3, ``transform`` and ``recipes`` for what follows 0.3,
``built`` and ``overrides`` for both. What a run does besides is in ``torchtitan_hooks``.
"""
