"""Micro-benchmarks: one file per structure, a table on the terminal, `--json` for machines."""
