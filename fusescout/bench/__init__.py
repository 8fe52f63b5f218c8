"""Benches: every kernel family on known shapes, and a suite of whole models, measured as an analysis measures."""
