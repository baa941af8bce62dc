"""Replays recorded allocations through every policy of the host allocator, on any machine."""
