// The part of TensorFlow's C interface used here (tensorflow/c: kernels.h, ops.h, tf_tensor.h, tf_status.h), written
// down so that nothing of TensorFlow is needed to build, and one library serves every version that has these functions.
// They are looked up among the libraries that the process has loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct TF_Status;
struct TF_Tensor;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_AsyncOpKernelDoneCallback;

namespace cohort::tensorflow {

/// Types, with the numbers of TF_DataType.
enum class Type : int {
  Float = 1,
  Double = 2,
  Int32 = 3,
  UInt8 = 4,
  Int16 = 5,
  Int8 = 6,
  Complex64 = 8,
  Int64 = 9,
  Bool = 10,
  BFloat16 = 14,
  UInt16 = 17,
  Complex128 = 18,
  Half = 19,
  UInt32 = 22,
  UInt64 = 23,
};

/// Error codes, with the numbers of TF_Code.
enum class Code : int {
  Ok = 0,
  InvalidArgument = 3,
  DeadlineExceeded = 4,
  ResourceExhausted = 8,
  FailedPrecondition = 9,
  Aborted = 10,
  Internal = 13,
};

/// Each function's name after "TF_", its result and its parameters.
#define COHORT_TENSORFLOW_FUNCTIONS(X)                                                                                 \
  X(NewStatus, TF_Status*, ())                                                                                         \
  X(DeleteStatus, void, (TF_Status*))                                                                                  \
  X(SetStatus, void, (TF_Status*, Code, const char*))                                                                  \
  X(GetCode, Code, (const TF_Status*))                                                                                 \
  X(Message, const char*, (const TF_Status*))                                                                          \
  X(DeleteTensor, void, (TF_Tensor*))                                                                                  \
  X(TensorType, Type, (const TF_Tensor*))                                                                              \
  X(NumDims, int, (const TF_Tensor*))                                                                                  \
  X(Dim, std::int64_t, (const TF_Tensor*, int))                                                                        \
  X(TensorData, void*, (const TF_Tensor*))                                                                             \
  X(TensorByteSize, std::size_t, (const TF_Tensor*))                                                                   \
  X(GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                               \
  X(AllocateOutput, TF_Tensor*, (TF_OpKernelContext*, int, Type, const std::int64_t*, int, std::size_t, TF_Status*))   \
  X(ForwardInputOrAllocateOutput, TF_Tensor*,                                                                          \
    (TF_OpKernelContext*, const int*, int, int, const std::int64_t*, int, int*, TF_Status*))                           \
  X(OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                                                  \
  X(OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                                        \
  X(OpKernelConstruction_GetAttrSize, void,                                                                            \
    (TF_OpKernelConstruction*, const char*, std::int32_t*, std::int32_t*, TF_Status*))                                 \
  X(OpKernelConstruction_GetAttrInt64, void, (TF_OpKernelConstruction*, const char*, std::int64_t*, TF_Status*))       \
  X(OpKernelConstruction_GetAttrString, void, (TF_OpKernelConstruction*, const char*, char*, std::size_t, TF_Status*)) \
  X(OpKernelConstruction_GetAttrStringList, void,                                                                      \
    (TF_OpKernelConstruction*, const char*, char**, std::size_t*, int, void*, std::size_t, TF_Status*))                \
  X(NewAsyncKernelBuilder, TF_KernelBuilder*,                                                                          \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*),                                                    \
     void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*), void (*)(void*)))                            \
  X(RunAsyncOpKernelDoneCallback, void, (TF_AsyncOpKernelDoneCallback*))                                               \
  X(RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                                         \
  X(NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                                    \
  X(OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                                          \
  X(OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                                         \
  X(OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                                        \
  X(OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                                           \
  X(OpDefinitionBuilderSetShapeInferenceFunction, void,                                                                \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))                                        \
  X(RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                                                 \
  X(NewShapeHandle, TF_ShapeHandle*, ())                                                                               \
  X(DeleteShapeHandle, void, (TF_ShapeHandle*))                                                                        \
  X(ShapeInferenceContextNumInputs, std::int64_t, (TF_ShapeInferenceContext*))                                         \
  X(ShapeInferenceContextGetInput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                \
  X(ShapeInferenceContextSetOutput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))               \
  X(ShapeInferenceContextSetUnknownShape, void, (TF_ShapeInferenceContext*, TF_Status*))

struct Api {
#define COHORT_DECLARE(name, Result, parameters) Result(*name) parameters = nullptr;
  COHORT_TENSORFLOW_FUNCTIONS(COHORT_DECLARE)
#undef COHORT_DECLARE
};

/// The functions in this process. All pointers are set after find_api has succeeded.
extern Api tf;

/// Returns the name of a function that this process's TensorFlow lacks; null if all were found.
const char* find_api() noexcept;

/// The function that an asynchronous kernel calls when it is done. TensorFlow lends it only during the call that
/// starts the kernel, so later calls need a copy. It is a std::function behind an opaque pointer, so a copy can be
/// made if TensorFlow was built with libstdc++, as this library is.
class DoneCallback {
 public:
  /// Makes an empty object if it is not known how to copy `lent`.
  explicit DoneCallback(const TF_AsyncOpKernelDoneCallback* lent);
  explicit operator bool() const noexcept { return static_cast<bool>(held_); }
  void run();

 private:
  std::function<void()> held_;
};

}  // namespace cohort::tensorflow
