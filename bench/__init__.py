"""Benchmarks and the GPU report."""
