"""What a decode step does outside its matrix products, three times over.

reference.py   plain PyTorch, any device: the definition the others are tested against
cpu.c, cpu.py  C, compiled once on the machine it runs on; used on a CPU where a C compiler is found
gpu.py         Triton, for the paged attention of decode steps on CUDA

Suffixes: T tokens of a step, D model, H query heads, K key/value heads, E head dimension, V vocabulary.
"""
