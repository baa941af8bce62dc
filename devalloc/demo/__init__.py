"""The demo: adjacency lists that grow, shrink and vanish inside kernels.

From the bottom up: ``graph`` (where edges come from), ``lists`` (the data structure and its
kernels), ``reference`` (the same on the CPU, for comparison), ``run`` (the job, its table and its
picture).
"""
