"""What a training needs before it runs: memory of each rank, bytes on the wire."""
