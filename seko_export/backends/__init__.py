"""One file per kind of engine that a build can make."""
