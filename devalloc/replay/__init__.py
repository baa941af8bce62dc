"""Recorded allocations, replayed through every policy of the host allocator, on any machine."""
