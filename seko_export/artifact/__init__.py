"""An artifact's files: weights, manifest, bill of materials, tar, signature."""
