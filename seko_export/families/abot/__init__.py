"""The model family ABot-World: Wan 2.2's 5B transformer, made causal, with keys that are added to the tokens."""
