"""Measuring: inflated copies of a pair, paired timing, intervals, and tables that report them."""
