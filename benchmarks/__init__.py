"""Benchmarks of the device heap. Not installed: run them from a checkout.

    python -m benchmarks.bench_device       # measure; rows go to benchmarks/results/
    python -m benchmarks.compare            # the newest rows beside peers and targets

Layers, from the bottom: ``rows`` (what is measured), ``workloads`` (the kernels), ``harness``
(timing, verification, provenance), ``runners`` (one function per pattern), ``worker`` (a child
process that measures rows), ``bench_device`` (the command) and ``compare`` (the tables).
"""
