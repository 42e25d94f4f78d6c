"""The model family minWM: Wan 2.1's 1.3B transformer, made causal, with a camera that attention sees as matrices."""
