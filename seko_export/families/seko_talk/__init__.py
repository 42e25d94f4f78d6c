"""The family Seko-Talk AR: talking video from a portrait and a voice, by Wan's 14B transformer with an audio adapter
in each layer."""
