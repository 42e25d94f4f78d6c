"""The speech workload on the build machine: description, goldens, estimates."""
