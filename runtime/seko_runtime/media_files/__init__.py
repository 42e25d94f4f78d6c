"""Pictures, sound and arrays in files of strangers: read by a closed list of formats, within bounds."""
