"""An experiment: a heap that hands out slots by lines of pages, raced against the heap.

The design is in docs/compact-heap.md. What is missing here: runs, errors, audits, exact
exhaustion, order between owners, and what follows when a ticket leads to no page. Nothing else
imports this.
"""
