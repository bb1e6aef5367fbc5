"""Tensor parallelism: layers whose weights are split over ranks that compute the same examples together.

Megatron-LM (Shoeybi et al. 2019). To split a model by a plan, use `Trainer(layout=Layout(Mesh(tensor=2), split={...}))`
or `convert`; to write split layers by hand, use the layers here with `group=position(mesh).tensor_set`.

A column layer (outputs split), elementwise layers and a row layer (inputs split) in sequence cost one sum over the
ranks forward and one backward; the same holds for attention split by heads and an Embedding split by words.
"""
