"""The speech workload (the code for models that speak) on the build machine: description, recorded steps, estimates."""
