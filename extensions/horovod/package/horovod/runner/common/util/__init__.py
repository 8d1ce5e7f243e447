"""The part of `horovod.runner.common.util` that programs import: `env`."""
