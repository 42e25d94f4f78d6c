"""The machine below the runtime: failures of it and of libraries as our errors, and signals that end a command."""
