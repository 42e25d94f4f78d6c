"""Several processes that replay one artifact together: their start, their messages, their end. Knows no workload."""
