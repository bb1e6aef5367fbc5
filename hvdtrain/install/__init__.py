"""Builds Horovod for the TensorFlow that is installed here, without a fork and without root.

`probe`          what this environment has, and one line with its fix for each thing that is missing;
`recipe`         from that to the wheel's name in the cache, the build's environment and its commands (pure);
`horovod_cmake`  stands in for cmake during the build and makes the sources fit today's TensorFlow;
`cache`          built wheels, kept outside the clone;
`progress`       a long command with a progress bar and a log;
`build`          build, keep, install;
`selftest`       two ranks, one allreduce.
"""
