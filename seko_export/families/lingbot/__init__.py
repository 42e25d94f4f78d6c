"""The model family lingbot-world-fast, which is Wan 2.2's image-to-video transformer, made causal, with a camera input
in every layer."""
