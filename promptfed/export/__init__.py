"""Export of results: adapted models, their cards and their files."""
