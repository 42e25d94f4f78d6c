"""Weather: a small video model in which a person lets the wind blow."""
