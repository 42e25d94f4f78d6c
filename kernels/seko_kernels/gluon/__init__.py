"""Device code in Gluon, an experimental interface of Triton: imported only when it is used."""
