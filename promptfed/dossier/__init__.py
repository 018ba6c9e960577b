"""Drafts for data protection officers and auditors, whose figures come from the record alone."""
