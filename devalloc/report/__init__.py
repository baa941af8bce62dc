"""What people look at: pictures of a heap, snapshots in files, and what a machine can do.

Nothing is imported here, so that `environment` works where Triton or matplotlib are missing.
"""
