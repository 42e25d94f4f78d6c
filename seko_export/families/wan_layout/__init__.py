"""What checkpoints of Wan's layers have in common, whichever family they belong to."""
