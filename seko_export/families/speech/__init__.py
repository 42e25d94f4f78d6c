"""The interface of families of speech models, and the configuration of their builds."""
