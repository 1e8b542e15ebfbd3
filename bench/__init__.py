"""Measurements: accuracy and speed of the optimizer. Run from the root of the repository, `python -m bench.NAME`."""
