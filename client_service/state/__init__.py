"""What a client keeps on disk. Each file is written as a whole or not at all."""
