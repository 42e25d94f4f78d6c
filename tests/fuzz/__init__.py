"""Seeded damage to everything that the boxes read: each case ends well or in an error of ours, within its limits."""
