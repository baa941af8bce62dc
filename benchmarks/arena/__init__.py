"""Arenas beside PyTorch's allocator: tensors, training runs, whole programs, regions."""
