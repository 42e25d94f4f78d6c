"""The processes (one for each GPU) that replay one artifact together: how they are started, messaged and ended. The
package `seko_runtime.parallel` contains no code for any workload."""
