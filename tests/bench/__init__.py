"""What docs/benchmarks.md says beyond the demo's figures, measured on the real engine."""
