"""HuBERT: windows of a voice to features, as an engine."""
