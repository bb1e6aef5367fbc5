"""The programs that a launch consists of, each run as `python -m hvdtrain.start.NAME`.

They may load Horovod's launcher (`horovod.runner`), which does not load TensorFlow.
"""
