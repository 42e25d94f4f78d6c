"""The family of Wan's image-to-video models: a first picture, and in some a last one, beside the text."""
