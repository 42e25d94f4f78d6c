"""Access control of the server, with API keys, tickets, resume tokens, origins, rates."""
