"""What bench_gpu.py is made of: how things are timed, what is compared, and one module a group of figures."""
