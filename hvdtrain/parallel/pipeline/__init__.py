"""Pipeline parallelism: a model is cut into stages, through which micro-batches pass one after another."""
