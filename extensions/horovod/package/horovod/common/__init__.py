"""The parts of `horovod.common` that programs import: `exceptions`, `util`, `process_sets`, `basics`."""
