"""Model families, one folder each, and the transformer layers that they share."""
