"""What a build is made for, as frozen dataclasses that check themselves. No model's modules."""
