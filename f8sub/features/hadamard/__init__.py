"""The random Hadamard transform of formats that ask for one, such as NVFP4's for wgrad."""
