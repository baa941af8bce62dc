"""Debug heaps: a layer over the heap, of which an ordinary heap's code has nothing.

From the bottom up: ``block_table`` (what is known of every block), ``guards`` (guard bytes and
poison), ``guarded_calls`` (malloc and free with both), ``debug_upkeep`` (what the host launches).
"""
