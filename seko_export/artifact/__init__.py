"""The files of an artifact: weights, manifest, bill of materials, tar, signature."""
