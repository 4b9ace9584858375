"""The laboratory: workloads, live drivers, benchmarks, the demo. Imports the pure cores; drives the rest from outside."""
