"""An experiment: a heap that hands out slots by lines of pages, raced against the heap.

The design is in docs/compact-heap.md. What is missing here: runs, errors, audits, exact
exhaustion, order between owners, what follows when a ticket leads to no page, and the last step of
the rule for laps (in the document, under "What is left"). Nothing else imports this.
"""
