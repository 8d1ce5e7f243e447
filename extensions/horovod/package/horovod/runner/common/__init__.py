"""The part of `horovod.runner.common` that programs import: `util.env`."""
