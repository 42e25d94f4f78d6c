"""From what the user asks for to a build's configuration and the files it reads."""
