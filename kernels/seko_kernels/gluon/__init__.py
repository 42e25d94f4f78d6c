"""Device code in Gluon, an experimental low-level language of Triton, which is imported only when it is used."""
