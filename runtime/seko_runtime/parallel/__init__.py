"""The processes (one for each GPU) that replay one artifact together: how they are started, messaged and ended. This
package contains no code for any workload."""
