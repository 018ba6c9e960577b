"""What the coordinator keeps: rows in a database, tensors in blobs named by their digest."""
