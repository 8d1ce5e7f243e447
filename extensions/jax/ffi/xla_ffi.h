// Layouts of the structs that XLA passes to a typed foreign function and takes from it: version 0.1 of its C interface,
// which later minor versions only add to (compared: jaxlib 0.5.0, 0.7.2, 0.9.0 and 0.10.2, which has 0.3). Written down
// here, so that nothing of JAX is needed to build. Check the size of a struct from XLA before reading it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cohort::xla {

inline constexpr int kMajor = 0;
inline constexpr int kLeastMinor = 1;
inline constexpr int kMostMinor = 3;  // the answer to newer versions; XLA then decides

/// Every struct begins with its size and a list of extensions.
struct Extension {
  std::size_t size;
  std::int32_t type;
  Extension* next;
};
struct Head {
  std::size_t size;
  Extension* extensions;
};

struct Error;   // XLA's own
struct Future;  // XLA's own

enum class Code : std::int32_t {
  InvalidArgument = 3,
  DeadlineExceeded = 4,
  FailedPrecondition = 9,
  Aborted = 10,
  Internal = 13,
  Unavailable = 14,
};

enum class Type : std::int32_t {
  Pred = 1,
  S8 = 2,
  S16 = 3,
  S32 = 4,
  S64 = 5,
  U8 = 6,
  U16 = 7,
  U32 = 8,
  U64 = 9,
  F16 = 10,
  F32 = 11,
  F64 = 12,
  C64 = 15,
  BF16 = 16,
  C128 = 18,
};

struct Buffer {
  Head head;
  Type dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

/// Operands, or results.
struct Values {
  Head head;
  std::int64_t size;
  std::int32_t* kinds;  // kBuffer
  void** values;
};
inline constexpr std::int32_t kBuffer = 1;

struct Text {
  const char* data;
  std::size_t size;
};
struct Scalar {
  Type dtype;
  void* value;
};
struct Array {
  Type dtype;
  std::size_t size;
  void* data;
};

struct Attributes {
  Head head;
  std::int64_t size;
  std::int32_t* kinds;
  Text** names;
  void** values;
};
inline constexpr std::int32_t kArray = 1;
inline constexpr std::int32_t kScalar = 3;
inline constexpr std::int32_t kText = 4;

struct Version {
  Head head;
  std::int32_t major;
  std::int32_t minor;
};

struct ErrorCreate {
  Head head;
  const char* message;
  Code code;
};
struct FutureCreate {
  Head head;
  Future* future;  // out
};
struct FutureSetAvailable {
  Head head;
  Future* future;
};
struct FutureSetError {
  Head head;
  Future* future;
  Error* error;  // belongs to XLA from then on
};

using Unused = void (*)();

struct Api {
  Head head;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  Unused error_get_message, error_destroy, handler_register, stream_get, type_register, context_get, state_set,
      state_get, memory_allocate, memory_free, threads_schedule, threads_count;
  Error* (*future_create)(FutureCreate*);
  Error* (*future_set_available)(FutureSetAvailable*);
  Error* (*future_set_error)(FutureSetError*);
};

enum class Stage : std::int32_t { Instantiate = 0, Prepare = 1, Initialize = 2, Execute = 3 };

struct CallFrame {
  Head head;
  const Api* api;
  void* context;
  Stage stage;
  Values operands;
  Values results;
  Attributes attributes;
  Future* future;  // out: completed later; until then XLA keeps operands, results and attributes
};

/// Type of the extension that marks a call that only asks for the handler's metadata.
inline constexpr std::int32_t kMetadata = 1;
struct Metadata {
  std::size_t size;
  Version version;
  std::uint32_t traits;
};
struct MetadataExtension {
  Extension head;
  Metadata* metadata;
};

}  // namespace cohort::xla
