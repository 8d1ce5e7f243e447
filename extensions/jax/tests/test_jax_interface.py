"""The part of XLA's C interface in extensions/jax/ffi/xla_ffi.h equals the header of the JAX here. Needs a compiler besides
JAX."""

import os
import pathlib
import shutil
import subprocess
import unittest

from support_jax import NEEDED, jax

OURS = pathlib.Path(__file__).resolve().parents[1] / "ffi"

# (XLA's struct, ours): the fields of both, in their order.
STRUCTS = {
    ("XLA_FFI_Extension_Base", "Extension"): [("struct_size", "size"), ("type", "type"), ("next", "next")],
    ("XLA_FFI_Buffer", "Buffer"): [("struct_size", "head"), ("dtype", "dtype"), ("data", "data"), ("rank", "rank"), ("dims", "dims")],
    ("XLA_FFI_Args", "Values"): [("size", "size"), ("types", "kinds"), ("args", "values")],
    ("XLA_FFI_Rets", "Values"): [("size", "size"), ("types", "kinds"), ("rets", "values")],
    ("XLA_FFI_ByteSpan", "Text"): [("ptr", "data"), ("len", "size")],
    ("XLA_FFI_Scalar", "Scalar"): [("dtype", "dtype"), ("value", "value")],
    ("XLA_FFI_Array", "Array"): [("dtype", "dtype"), ("size", "size"), ("data", "data")],
    ("XLA_FFI_Attrs", "Attributes"): [("size", "size"), ("types", "kinds"), ("names", "names"), ("attrs", "values")],
    ("XLA_FFI_Api_Version", "Version"): [("major_version", "major"), ("minor_version", "minor")],
    ("XLA_FFI_Error_Create_Args", "ErrorCreate"): [("message", "message"), ("errc", "code")],
    ("XLA_FFI_Future_Create_Args", "FutureCreate"): [("future", "future")],
    ("XLA_FFI_Future_SetAvailable_Args", "FutureSetAvailable"): [("future", "future")],
    ("XLA_FFI_Future_SetError_Args", "FutureSetError"): [("future", "future"), ("error", "error")],
    ("XLA_FFI_CallFrame", "CallFrame"): [
        (name, name) for name in ("api", "stage", "future")
    ] + [("ctx", "context"), ("args", "operands"), ("rets", "results"), ("attrs", "attributes")],
    ("XLA_FFI_Metadata_Extension", "MetadataExtension"): [("metadata", "metadata")],
}  # fmt: skip
# These structs grow, or are used in part. The fields that we use have to be at the same offsets.
GROWING = {
    ("XLA_FFI_Metadata", "Metadata"): [("struct_size", "size"), ("api_version", "version"), ("traits", "traits")],
    ("XLA_FFI_Api", "Api"): [
        ("api_version", "version"),
        ("XLA_FFI_Error_Create", "error_create"),
        ("XLA_FFI_Future_Create", "future_create"),
        ("XLA_FFI_Future_SetAvailable", "future_set_available"),
        ("XLA_FFI_Future_SetError", "future_set_error"),
    ],
}
NUMBERS = {
    "XLA_FFI_Extension_Metadata": "kMetadata",
    "XLA_FFI_ArgType_BUFFER": "kBuffer",
    "XLA_FFI_RetType_BUFFER": "kBuffer",
    "XLA_FFI_AttrType_ARRAY": "kArray",
    "XLA_FFI_AttrType_SCALAR": "kScalar",
    "XLA_FFI_AttrType_STRING": "kText",
    "XLA_FFI_ExecutionStage_EXECUTE": "Stage::Execute",
    "XLA_FFI_API_MAJOR": "kMajor",
    **{f"XLA_FFI_DataType_{name.upper()}": f"Type::{name}" for name in
       ("Pred", "S8", "S16", "S32", "S64", "U8", "U16", "U32", "U64", "F16", "F32", "F64", "C64", "C128", "BF16")},
    "XLA_FFI_Error_Code_INVALID_ARGUMENT": "Code::InvalidArgument",
    "XLA_FFI_Error_Code_DEADLINE_EXCEEDED": "Code::DeadlineExceeded",
    "XLA_FFI_Error_Code_FAILED_PRECONDITION": "Code::FailedPrecondition",
    "XLA_FFI_Error_Code_ABORTED": "Code::Aborted",
    "XLA_FFI_Error_Code_INTERNAL": "Code::Internal",
    "XLA_FFI_Error_Code_UNAVAILABLE": "Code::Unavailable",
}  # fmt: skip


def program():
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla_ffi.h"', "namespace ours = cohort::xla;"]
    for structs, growing in ((STRUCTS, False), (GROWING, True)):
        for (theirs, own), fields in structs.items():
            if not growing:
                lines.append(f"static_assert(sizeof({theirs}) == sizeof(ours::{own}));")
            for field, of_ours in fields:
                lines.append(f"static_assert(offsetof({theirs}, {field}) == offsetof(ours::{own}, {of_ours}));")
    for theirs, own in NUMBERS.items():
        lines.append(f"static_assert({theirs} == static_cast<int>(ours::{own}));")
    return "\n".join(lines) + "\n"


@unittest.skipIf(jax is None, NEEDED)
class Interface(unittest.TestCase):
    def check(self, text):
        compiler = os.environ.get("CXX") or shutil.which("c++")
        if compiler is None:
            self.skipTest("needs a C++ compiler")
        return subprocess.run(
            [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-I", jax.ffi.include_dir(), "-I", str(OURS), "-"],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_the_layouts(self):
        done = self.check(program())
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_wrong_layout_is_seen(self):
        done = self.check(program().replace("ours::CallFrame, results", "ours::CallFrame, operands"))
        self.assertIn("static assertion failed", done.stderr)


if __name__ == "__main__":
    unittest.main()
