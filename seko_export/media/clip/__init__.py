"""CLIP's image encoder: a picture to features, as an engine."""
