"""The uses of ``examples/`` beside what one would do without a heap: ``devalloc bench uses``."""
