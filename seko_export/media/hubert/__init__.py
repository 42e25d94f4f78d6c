"""HuBERT, an audio encoder: windows of a voice to features, as an engine."""
