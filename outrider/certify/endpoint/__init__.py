"""Certification of a server: what comes over HTTP held to the law of plain decoding."""
