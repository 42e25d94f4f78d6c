"""`seko-export plan`: memory and time of a video build on a GPU that need not be present."""
