"""Certification of a model as it is served: what comes out held to the law of plain decoding."""
