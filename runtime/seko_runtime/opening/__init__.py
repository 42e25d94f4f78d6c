"""Opening an artifact: all checks, then weights and engines, then sessions; comparison with its goldens."""
