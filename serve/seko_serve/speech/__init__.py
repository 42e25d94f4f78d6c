"""Live speech: sessions that speak what their clients write, and OpenAI's request for speech."""
