"""What a workload adds to a build, and the table of workloads."""
