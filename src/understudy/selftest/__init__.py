"""Selftest: benchmarks and crash tests that users run on their own machine."""
