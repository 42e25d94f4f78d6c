"""From the user's options to a build's configuration and the files that it reads."""
