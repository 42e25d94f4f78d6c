"""The workloads of the exporter and their table."""
