"""The family of Wan's image-to-video models. The models take a first picture beside the text, and some models also a
last picture."""
