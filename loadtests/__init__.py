"""The laboratory: workloads, live drivers, benchmarks and the demo. Imports the pure cores; drives everything else from outside."""
