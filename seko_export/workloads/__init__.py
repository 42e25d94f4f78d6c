"""The workloads (kinds of model, such as video) that the exporter knows, and their table."""
