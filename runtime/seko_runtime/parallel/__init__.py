"""The processes (one for each GPU) that replay one artifact together: starting the processes, messages between them,
and ending them. The package `seko_runtime.parallel` contains no code for any workload."""
