"""Seko-Talk AR: a portrait and a voice become a talking video; Wan's 14B layout with an audio adapter in each layer."""
