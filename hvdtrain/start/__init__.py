"""The programs of a launch, each run as `python -m hvdtrain.start.NAME`.

They may import Horovod's launcher (`horovod.runner`), which does not load TensorFlow.
"""
