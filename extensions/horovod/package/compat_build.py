"""Makes the wheel cohort-horovod: a PEP 517 backend that needs nothing but the standard library, so that
`pip install extensions/horovod/package` works without a network."""

import base64
import hashlib
import os
import pathlib
import re
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
NAME = "cohort_horovod"


def _version():
    return re.search(r'__version__ = "([\d.]+)\+', (HERE / "horovod/__init__.py").read_text())[1]


def _metadata():
    return "\n".join([
        "Metadata-Version: 2.1",
        "Name: cohort-horovod",
        f"Version: {_version()}",
        "Summary: The package horovod and the command horovodrun, over Cohort",
        "License: Apache-2.0",
        "Requires-Python: >=3.9",
        "Provides-Dist: horovod",
        "Classifier: Operating System :: POSIX :: Linux",
        "Classifier: Programming Language :: Python :: 3",
        "Description-Content-Type: text/markdown",
        "",
        (HERE / "README.md").read_text(),
    ])


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    info = f"{NAME}-{_version()}.dist-info"
    files = {
        str(path.relative_to(HERE)): path.read_bytes()
        for path in sorted((HERE / "horovod").rglob("*.py"))
    }
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: compat_build\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nhorovodrun = horovod.runner.launch:run_commandline\n"
    record = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    name = f"{NAME}-{_version()}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))  # the same bytes from the same sources
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            wheel.writestr(entry, data)
    return name


def get_requires_for_build_wheel(config_settings=None):
    return []


def get_requires_for_build_sdist(config_settings=None):
    return []


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("cohort-horovod is installed from a clone of Cohort: pip install extensions/horovod/package")
