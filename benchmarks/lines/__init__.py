"""The next heap, as an experiment: raced against the heap, and complete but for debug heaps.

The design is in docs/compact-heap.md, and what is missing under "What is left" there. Nothing else
imports this.
"""
