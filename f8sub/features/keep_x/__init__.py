"""The option ``keep_x``: what layers save of x for wgrad, and which recipes can take it.

"auto" is "high_precision" where the operator that made x saves it anyway, as attention saves its result; else "float8".
``torch.compile`` cannot see that, and hooks for saved tensors (checkpointing, offloading) may pack each tensor by
itself: there "auto" is "float8". ``f8sub/linear/saved_input.py`` says what each saves.
"""
