"""What tests and benchmarks share: cases, tolerances, backends, mutations. Needs the `test` extra."""
