"""Model families (Wan and its relatives, Seko-Talk, VoxCPM2), one folder each, and the transformer layers that they
share."""
