"""Benchmarks. Not installed: run them from a checkout, as `devalloc bench`.

Below all: ``results`` (files of rows), ``harness`` (timing, verification, provenance), ``child`` (a
worker process), ``options`` (of the commands) and ``patches`` (changed copies of the device code).
Then a folder for each question, in which the modules ``bench_...`` are the commands:

``device``  what a malloc and a free cost. From the bottom: ``plan`` (what is measured),
            ``workloads`` (the kernels), ``cuda_malloc`` (CUDA's own malloc), ``bench`` (rounds of
            allocating and freeing), ``sweeps`` and ``runners`` (one function per pattern),
            ``worker`` (a child process that measures rows), ``bench_device``.
``arena``   arenas beside PyTorch's allocator, and the recorder of traces.
``uses``    programs with a heap beside the same without one.
``stress``  is the heap right on a GPU: stress, litmus tests, compute-sanitizer.
``tables``  ``comparison`` (peers, targets, ceilings), ``checks`` (what must stay flat), ``tables``,
            ``plots`` and ``compare`` (the command).
``lines``   an experiment.
"""
