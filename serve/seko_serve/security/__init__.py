"""Access and its limits: keys, tickets, resume tokens, origins, rates."""
