"""What users see at a terminal: tables and lines, and the progress of a federation."""
