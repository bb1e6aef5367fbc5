"""Tensor parallelism: layers whose weights are split over ranks that compute the same examples together.

Megatron-LM (Shoeybi et al. 2019). By a plan: `Trainer(layout=Layout(Mesh(tensor=2), split={...}))`, or `convert`; by
hand: the layers here, whose `group` is `position(mesh).tensor_set`.

A column layer (its outputs split) followed by elementwise layers and a row layer (its inputs split) costs one sum
over the ranks forward and one backward; so do attention split by heads and an Embedding split by words.
"""
