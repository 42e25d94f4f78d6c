"""Who may do what, and how often: keys, tickets, resume tokens, origins, rates."""
