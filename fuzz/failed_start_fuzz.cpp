// Output of ssh, srun, shells and sshd's banner before an agent came: a line of advice comes out, whatever the output
// was, and nothing in it can steer a terminal.
#include "launch/start/starter.h"
#include "net/http.h"

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::launch;
  FuzzedDataProvider input(data, size);
  FailedStart failed;
  failed.method = input.PickValueInArray({StartMethod::Ssh, StartMethod::Slurm, StartMethod::Mpi});
  failed.host = "h";
  failed.command = "cohort";
  failed.announced = input.ConsumeBool();
  if (input.ConsumeBool()) {
    cohort::sys::ExitStatus status;
    status.code = input.ConsumeIntegralInRange(0, 255);
    status.signal = input.ConsumeBool() ? input.ConsumeIntegralInRange(0, 64) : 0;
    failed.status = status;
  }
  failed.noise = input.ConsumeRandomLengthString(2000);
  failed.complaints = input.ConsumeRemainingBytesAsString();
  const Diagnosis diagnosis = diagnose(failed);
  if (diagnosis.kind.empty() || diagnosis.why.empty()) std::abort();
  if (is_transient(failed) && (failed.announced || !failed.status)) std::abort();
  const std::string line = explain(failed);
  if (line.empty() || cohort::net::as_line(failed.complaints).size() > 600) std::abort();
  for (const char c : line) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') std::abort();
  }
  return 0;
}
