"""The main job: adjacency lists that grow, shrink and vanish inside kernels.

In the order in which the layers build on one another: ``graph`` (where edges come from),
``lists`` (the data structure and its kernels), ``reference`` (the same on the CPU, to compare),
``run`` (the job, its table and its picture).
"""
