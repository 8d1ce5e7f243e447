// NCCL, loaded at run time: the build does not need it, and a machine may lack it. Declares the functions of NCCL 2.18
// and newer, as in its manual. A process has one library; it stays loaded. Any thread.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <string>
#include <string_view>

namespace cohort::comm::cuda {

/// Result of NCCL's functions.
enum class NcclResult : int { Success = 0 };
/// Identifier by which the ranks of a communicator find each other.
struct NcclId {
  char bytes[128];
};
/// A communicator of NCCL's.
using NcclComm = void*;

enum class NcclType : int {
  Int8 = 0,
  UInt8 = 1,
  Int32 = 2,
  UInt32 = 3,
  Int64 = 4,
  UInt64 = 5,
  Float16 = 6,
  Float32 = 7,
  Float64 = 8,
  BFloat16 = 9,
};
/// NCCL's built-in operations; others are created with a communicator.
enum class NcclOp : int { Sum = 0, Product = 1, Max = 2, Min = 3, Average = 4 };

/// Options of a communicator: the fields of NCCL 2.18. NCCL chooses the values of unset fields.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 1;
  int cluster_size = kUnset;
  int least_blocks = kUnset;
  int most_blocks = kUnset;
  const char* network = nullptr;
  int share_when_split = kUnset;

 private:
  static constexpr int kUnset = -2147483647 - 1;
};

struct NcclFunctions {
  NcclResult (*ncclGetVersion)(int*) = nullptr;
  NcclResult (*ncclGetUniqueId)(NcclId*) = nullptr;
  NcclResult (*ncclCommInitRankConfig)(NcclComm*, int, NcclId, int, NcclConfig*) = nullptr;
  NcclResult (*ncclCommDestroy)(NcclComm) = nullptr;
  NcclResult (*ncclCommAbort)(NcclComm) = nullptr;
  NcclResult (*ncclCommGetAsyncError)(NcclComm, NcclResult*) = nullptr;
  const char* (*ncclGetErrorString)(NcclResult) = nullptr;
  const char* (*ncclGetLastError)(NcclComm) = nullptr;
  NcclResult (*ncclGroupStart)() = nullptr;
  NcclResult (*ncclGroupEnd)() = nullptr;
  NcclResult (*ncclAllReduce)(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm, void*) = nullptr;
  NcclResult (*ncclRedOpCreatePreMulSum)(NcclOp*, void*, NcclType, int, NcclComm) = nullptr;
  NcclResult (*ncclRedOpDestroy)(NcclOp, NcclComm) = nullptr;
  NcclResult (*ncclReduce)(const void*, void*, std::size_t, NcclType, NcclOp, int, NcclComm, void*) = nullptr;
  NcclResult (*ncclReduceScatter)(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm, void*) = nullptr;
  NcclResult (*ncclBroadcast)(const void*, void*, std::size_t, NcclType, int, NcclComm, void*) = nullptr;
  NcclResult (*ncclAllGather)(const void*, void*, std::size_t, NcclType, NcclComm, void*) = nullptr;
  NcclResult (*ncclSend)(const void*, std::size_t, NcclType, int, NcclComm, void*) = nullptr;
  NcclResult (*ncclRecv)(void*, std::size_t, NcclType, int, NcclComm, void*) = nullptr;
};

struct Nccl {
  /// Versions are numbered as in NCCL: 2.30.7 is 23007.
  static constexpr int kOldest = 21800;
  /// Version from which ranks may share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE says so.
  static constexpr int kSharesGpus = 23000;

  NcclFunctions call;
  int version = 0;
  std::string path;

  /// Returns the library, which is loaded only once. Tries, in order: a library already in the process (torch's),
  /// COHORT_NCCL, the wheel nvidia-nccl next to Python packages in use, the system's search. Fails with Unavailable,
  /// which says why there is none and how to get one.
  static const Result<Nccl>& find();
  /// Searches like `find`, but anew in each call, with `chosen` as the value of COHORT_NCCL.
  static Result<Nccl> load(const std::string& chosen);
  /// Formats a version as "2.30.7".
  static std::string text_of(int version);
  /// Describes a result, with NCCL's own text. `comm` may be null.
  std::string said(NcclResult result, NcclComm comm) const;
};

}  // namespace cohort::comm::cuda
