"""The family of Matrix-Game 2.0: worlds that begin with a picture and answer to keyboard and mouse, without a text."""
