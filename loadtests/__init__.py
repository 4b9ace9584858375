"""The laboratory: workloads, live drivers, benchmarks, the demo. Imports pure cores; drives the rest from outside."""
