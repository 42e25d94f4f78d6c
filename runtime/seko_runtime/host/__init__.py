"""The machine under the runtime: its faults and those of libraries as errors of the runtime, and signals that end a
command."""
