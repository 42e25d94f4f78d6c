"""Opens artifacts: all checks, then weights and engines, then sessions; compares chunks with goldens."""
