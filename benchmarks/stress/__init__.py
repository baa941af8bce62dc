"""Whether the heap is right on a GPU.

The stress run: `kernels` work on the heap, `plan` says which and how long, `run` does it and
compares the counts, `worker` is the process it happens in, `bench_stress` the command.
`bench_litmus` runs the litmus tests, `bench_sanitize` a little of both under compute-sanitizer.
"""
