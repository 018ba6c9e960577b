"""Taking a result away: adapted models, their cards and files."""
