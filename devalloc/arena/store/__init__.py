"""The state of a cache, and the steps that policies are made of."""
