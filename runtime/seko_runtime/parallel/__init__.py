"""The processes that replay one artifact together: how they are started, messaged and ended. Knows no workload."""
