"""The device heap, row by row: what a malloc and a free cost."""
