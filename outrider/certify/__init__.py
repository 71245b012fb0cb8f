"""Certification: the rules held to the target's law by exact enumeration and path by path."""
