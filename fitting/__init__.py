"""Curve fits of runs: readers, models, fits, intervals, comparisons, figures."""
