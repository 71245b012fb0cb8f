"""Measuring: inflated copies of a pair, paired timing, intervals, and the tables that report them."""
