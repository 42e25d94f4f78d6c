"""The speech workload: text to token ids, and prompts of a model that makes speech in patches (short pieces of
sound)."""
