"""Other libraries on the memory of an arena: Triton, PyTorch, cuda.core, CuPy.

Each module needs its library only when it is used. `devalloc.Arena` has a method for each, but for
CuPy: `devalloc.interop.cupy.allocator`.
"""
