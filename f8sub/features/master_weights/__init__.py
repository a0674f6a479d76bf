"""An optimizer's float32 masters of weights that the model holds in fewer bits: bfloat16, float16 or float8."""
