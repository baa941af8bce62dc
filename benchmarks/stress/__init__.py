"""The stress run: `kernels` work on the heap, `plan` says which and how long, `run` does it and
settles the accounts, `worker` is the process it happens in."""
