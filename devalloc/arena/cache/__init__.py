"""The caching allocator: the lock and the entry points, and the parts that work under it."""
