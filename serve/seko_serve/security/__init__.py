"""Access control of the server: API keys, tickets, resume tokens, origins, rates."""
