"""Memory and time of a build on any GPU, predicted: `seko-export plan`."""
