"""Pipeline parallelism: a model cut into stages, which work on micro-batches one behind the other."""
