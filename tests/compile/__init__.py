"""What the compiler makes of the kernels, for every target, read without a GPU.

user_kernels    the smallest kernels a user could write around each device function
reference       a kernel that compile times are measured against
cases           what is compiled: these kernels and the kernels' own entry points
targets         compiles one case for one target and reads its resources
measure         runs targets in processes that do not interpret
constant_mask   compiles a request of which no lane takes part
release         whether an ordinary heap's code knows of debug heaps
budget          the committed limits, and how a measurement is compared with them
update          writes the limits from a measurement

``python -m tests.compile.measure`` prints a table, ``python -m tests.compile.update`` writes
budget.json.
"""
