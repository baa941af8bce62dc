"""Which block serves a request, and what is tried when none does: one module for each policy."""
