"""Load Horovod's library, and say what TensorFlow and Horovod can do: `python -m hvdtrain.doctor.engine_report`.

Prints one marked line of JSON, the fields of `hvdtrain.doctor.horovod.EngineReport`.
"""

import json

MARKER = "@hvdtrain-engine "


def main() -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    answer = {
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": bool(hvd.nccl_built()),
        "tensorflow_cuda": bool(tf.test.is_built_with_cuda()),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }
    print(MARKER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
