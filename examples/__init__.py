"""Programs to copy from. A package, so that benchmarks and tests find these and no others."""
