"""Speech: text to token ids, and the prompts of a model that decodes patch by patch."""
