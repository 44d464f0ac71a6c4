"""Kernels of a decode step, except its matrix products, in three implementations.

reference.py   plain PyTorch for any device: the definition that the other two are tested against
cpu.c, cpu.py  C, compiled once on the user's machine; used on a CPU if a C compiler is found
gpu.py         Triton, for the paged attention of decode steps on CUDA

Suffixes: T tokens of a step, D model, H query heads, K key/value heads, E head dimension, V vocabulary.
"""
