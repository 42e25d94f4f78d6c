"""The machine under the runtime: failures of machine and libraries as errors of the runtime, and signals that end a
command."""
