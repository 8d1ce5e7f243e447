// An NVML of two GPUs, of which the second is busy.
extern "C" {

int nvmlInit_v2() { return 0; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  static char devices[2];
  *device = &devices[index];
  devices[index] = static_cast<char>(index);
  return 0;
}

int nvmlDeviceGetUtilizationRates(void* device, unsigned* rates) {
  rates[0] = *static_cast<char*>(device) == 0 ? 0 : 80;
  rates[1] = 10;
  return 0;
}

int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* bytes) {
  const unsigned long long used = *static_cast<char*>(device) == 0 ? 1 : 3;
  bytes[0] = 80ULL << 30;
  bytes[1] = (80 - used) << 30;
  bytes[2] = used << 30;
  return 0;
}
}
