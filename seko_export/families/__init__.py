"""Model families, a folder each, and the transformer layers that they share."""
