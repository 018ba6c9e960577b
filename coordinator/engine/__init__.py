"""All federations of one data folder: changed in transactions, moved on by a scheduler."""
