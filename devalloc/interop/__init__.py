"""Memory of an arena for other libraries: Triton, PyTorch, cuda.core, CuPy.

Each module needs its library only when it is used. `devalloc.Arena` has a method for each but CuPy,
for which there is `devalloc.interop.cupy.allocator`. `memory_saver` has the names of
torch_memory_saver.
"""
