"""The parts of ``recipes/pretrain.py``; a package, because other packages have modules of such names, too."""
