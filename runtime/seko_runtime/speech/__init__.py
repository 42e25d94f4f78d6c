"""The speech workload: artifacts, pools and sessions of models that speak a text in patches (short pieces of sound)."""
