"""The models that can be exported, each one readable file of plain torch."""
