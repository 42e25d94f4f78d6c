"""Device code in Gluon, an experimental interface of Triton: imported when it is asked for, never before."""
