"""Benchmarks of the device heap. Not installed: run them from a checkout, as `devalloc bench`.

Layers, from the bottom: ``rows`` (what is measured), ``results`` (files of rows), ``workloads``
(the kernels), ``harness`` (timing, verification, provenance), ``cuda_malloc`` (CUDA's own malloc),
``bench`` (rounds of allocating and freeing), ``sweeps`` and ``runners`` (one function per pattern),
``worker`` (a child process that measures rows) and ``bench_device`` (the command). For what was
measured: ``comparison`` (peers, targets, ceilings), ``checks`` (what must stay flat), ``tables``,
``plots`` and ``compare`` (the command). ``bench_order``, with ``order_kernels``, stands alone.
"""
