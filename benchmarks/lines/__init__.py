"""An experiment: a heap that hands out slots by lines of pages, raced against the heap.

The design is in docs/compact-heap.md. What is missing here: runs, errors, audits, exact
exhaustion, lapped rings, and waits with a bound that ends well. Nothing else imports this.
"""
