"""Litmus tests of memory order on a device: the hand-over of blocks, and classic shapes."""
